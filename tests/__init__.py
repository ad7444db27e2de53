"""Tests of kfac_optim: exact properties against a dense oracle, then one file per feature."""
