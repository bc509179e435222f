"""flk_runtime: what runs in the pods."""
