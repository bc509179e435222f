"""The processes of a pod: what runs before its ranks, how they start, what they print, and how they end.

A rank is one process of the training. `preparation` installs what it needs, `preload` imports what all ranks share,
`forkserver` starts them, and `rank_process` is the code that a rank runs before and after the script. `ranks` gives the
ranks of the pod their variables, watches them, and says how one has failed. `output` passes on their lines, and
`service` runs the program of an extension beside them.
"""
