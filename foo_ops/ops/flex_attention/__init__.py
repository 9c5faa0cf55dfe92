"""Flex attention: from a user's function for one score to programs that kernels run."""
