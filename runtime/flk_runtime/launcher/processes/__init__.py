"""The processes of a pod: what runs before its ranks, how they start, what they print, and how they end.

A rank is one process of the training. `preparation` installs what it needs, `preload` imports what all ranks share,
`forkserver` starts them, `rank_process` is the code that a rank runs before and after the script, with the variables of
`environment`. `ranks` watches the ranks of the pod, `output` passes on their lines, `service` runs the program of an
extension beside them, `rank_failure` says how one has failed, and `pod_attempt` holds what the launcher knows of an
attempt in its pod."""
