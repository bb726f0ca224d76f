"""Several ranks of one run: what rank 0 decides reaches the others, and how one ended reaches rank 0."""
