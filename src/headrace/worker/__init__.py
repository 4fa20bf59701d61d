"""The worker process: drain, schedule, execute, apply, publish."""
