"""What tests share: small models and training loops, the dense oracle, real ranks, the model zoo."""
