"""Launching: from a request to jobs, and from jobs to states that tell the truth."""
