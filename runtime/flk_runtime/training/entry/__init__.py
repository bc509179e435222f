"""The ways into a training: `init`, `adopt`, `save` and `restore`, and the process group that they open."""
