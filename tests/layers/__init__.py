"""What each layer type, and models made of them, give as rows, factors and directions."""
