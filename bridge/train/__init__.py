"""Training: losses, schedules, training checkpoints, the blocks that the training stages share."""
