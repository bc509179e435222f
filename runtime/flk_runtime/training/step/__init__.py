"""A step of a training: its batches, what counts and ends it, and what ranks compare after it."""
