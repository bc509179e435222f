"""Rendezvous of the launchers of a job: which pods are there, which attempt runs, why it ended, what follows.

The launcher of pod 0 leads. Its `Server` accepts connections from the launchers of all pods, also from its own. They
are its members. Each `Member` holds one TCP connection, on which both sides send messages (`messages`), one in each
frame, with an authentication code (`flk_runtime.wire`). The leader (`launcher.coordinator.leader`) decides:

- When all members have sent Join, it sends AttemptStarted with the number of the attempt and the address of a TCPStore
  of torch for the ranks, which is new for each attempt.
- The first FailureReport, a connection that breaks and a lease that expires end the attempt: AttemptEnded. If the first
  failure is a consequence of another one, the leader waits at most half a second for a failure that is not.
- A PreemptionRequest, of a pod that has received SIGTERM, has all ranks save after the same step and end (see
  `launcher.preemption`). The attempt is over when the ranks of all pods have ended.
- A launcher that has to stop sends Stopping when no rank of its pod runs, so that nobody waits for it.
- Each member ends its ranks and joins again, with all failures that it saw. The leader chooses the cause among them.
- SuccessReports of all pods, a failure after which no attempt may follow, or a pod that never joins end the job:
  JobEnded, which members answer with Leave.

The leader also watches for hangs and slow ranks (`launcher.hangs`): heartbeats carry the progress of a pod's ranks, and
StacksRequested asks each member for their stacks, because the job hangs or because a member sent a Question.
The same heartbeats carry what the pod uses (`launcher.telemetry`), which a member asks for with a Question.

Members and leader send heartbeats, and give a connection up on which nothing has arrived for the time of a lease. A
member that loses its connection ends its ranks and connects again, each time, also to a new leader after the old one
was lost. It then sends the history of attempts, so numbers and restarts continue. The member of pod 0 sends the
history that it has read in the cluster: after the end of all launchers nobody else has it.

Server and Member serve their connections with a `PeerLoop` each (`peers`), in one thread each, and post events to the
loop of `launcher.agent`, which is their only user.
"""

from flk_runtime.launcher.transport.member import Member
from flk_runtime.launcher.transport.server import Server

__all__ = ["Member", "Server"]
