"""`flk restart`: run jobs anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flk.cli.options import AvoidNode, Context, LoseProgress, Namespace, Timeout, seconds
from flk.cli.several import Chosen, Jobs, Selector, Tell

if TYPE_CHECKING:
    from flk.observe.client import JobClient, JobRef


def restart(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    timeout: Timeout = None,
    avoid: AvoidNode = None,
    lose_progress: LoseProgress = False,
) -> int:
    """Run jobs anew from their last checkpoints in a volume or in S3. Counts of restarts begin anew.

    The code and the options stay. The pods of a job that runs get SIGTERM and their grace period, in which a job that
    uses flk's library saves. Checkpoints in memory end with the pods: a job that has no others is restarted only with
    --lose-progress. A job that has ended is deleted and created again under its name. Of several jobs, eight are
    restarted at a time. With -l, only jobs that flk has made are restarted. After Ctrl-C, restarts that have begun are
    finished.

    With --avoid-node, a job is deleted and created again under its name, with pods that do not run on the node. flk
    names the nodes on which pods of a job have failed repeatedly.
    """
    limit = seconds(timeout, "--timeout")
    from flk.jobs import lifecycle

    chosen = Chosen.of(jobs, selector, context, namespace, command="restart", own=True)
    may_lose = chosen.may_lose(lose_progress)
    begun: list[str] = []

    def act(client: JobClient, job: JobRef, tell: Tell) -> None:
        begun.append(job.name)
        lifecycle.restart(
            client,
            job.name,
            timeout=limit,
            report=tell,
            avoid=avoid or [],
            lose_progress=may_lose,
        )
        tell(f"job {job.name} is restarted; this shows what its ranks print: {client.commands.flk('logs', job.name)}")
        begun.remove(job.name)

    try:
        return chosen.in_parallel(act)
    except KeyboardInterrupt as interrupt:
        if begun:
            status, resume = (chosen.client.commands.flk(verb, " ".join(begun)) for verb in ("status", "resume"))
            left = f"{status} shows what was being restarted; {resume} starts it"
            interrupt.args = ("; ".join([*map(str, interrupt.args), left]),)
        raise
