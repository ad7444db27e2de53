"""Training through Accelerate, DeepSpeed, Horovod, Lightning and transformers' Trainer."""
