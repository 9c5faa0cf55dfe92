"""Specs of the package's operators, with samples: one `OpSpec` per operator."""
