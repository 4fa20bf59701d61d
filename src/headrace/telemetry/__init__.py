"""What is measured: the catalogue, its accumulation and its exposition."""
