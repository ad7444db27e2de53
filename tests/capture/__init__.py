"""What is recorded during forward and backward passes, and for which loss."""
