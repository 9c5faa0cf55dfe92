"""Mixtures of experts: groups of rows with a matrix each, and the experts of all tokens."""
