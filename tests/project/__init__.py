"""The repository itself: README's code and the architecture of the package."""
