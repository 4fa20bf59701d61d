"""`headrace simulate`: the scheduler under a virtual clock, on synthetic or recorded traffic. Nothing here ever waits."""
