"""Other projects' optimizers, as the studies take them; each module is imported only for its class."""
