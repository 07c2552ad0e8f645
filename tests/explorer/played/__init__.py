"""Environments of other libraries, as their authors write them."""
