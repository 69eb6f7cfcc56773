"""TRL's GRPOTrainer, unchanged, through this server and through the servers it was written for."""
