"""A step of a training: its batches, its backward passes, what ranks compare after it, and what is printed of it."""
