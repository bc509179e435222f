"""Rendezvous of the launchers of a job: which pods are there, which attempt runs, why it ended, what follows.

The launcher of pod 0 leads. It serves the rendezvous store, a TCPStore of torch. Every launcher, also that of pod 0,
is a member. A round is one attempt to run all ranks. These keys of the store carry the protocol:

    leader               identifies the leader's process
    round                number of the current round, for launchers that come late
    <round>/join/<pod>   from each member: it has joined, and which failures it saw in the last attempt
    <round>/start        from the leader, when all have joined: number of the attempt, and address of a TCPStore for
                         its ranks, which is new for each attempt; or the job's record if no attempt follows
    <round>/done         counter of the pods whose ranks have all succeeded
    <round>/done/<pod>   counter of how often a pod has reported that, so that it counts once
    <round>/primary      set when a launcher knows a failure that is not secondary: members that read a secondary one
                         in <round>/end wait for it, for at most half a second, before they end their ranks
    <round>/end          from the first pod that sees it: a failure (by compare-and-set); or success of every pod
    left                 counter of the members that know how the job ended

All members wait for ``<round>/end``, so one failure ends the attempt in every pod at once. A launcher that finds its
own key in the current round belongs to a pod that was restarted: it ends that attempt. If pod 0 is restarted its store
is empty. The other members then send the history of attempts, so numbers and restarts continue.

`Leader` and `Member` run in threads and post events to the loop of `launcher.agent`, which is their only user. torch is
imported when the store is opened.
"""

from flk_runtime.launcher.rendezvous.leader import Leader
from flk_runtime.launcher.rendezvous.member import Member
from flk_runtime.launcher.rendezvous.messages import (
    AttemptEnded,
    AttemptStarted,
    Event,
    JobEnded,
    LeaderLost,
    ThreadFailed,
)

__all__ = ["AttemptEnded", "AttemptStarted", "Event", "JobEnded", "Leader", "LeaderLost", "Member", "ThreadFailed"]
