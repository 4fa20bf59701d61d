"""StepPlan -> arrays -> model -> sampled tokens. One file for each engine."""
