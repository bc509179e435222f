"""JobCache: what was seen last of one job and of its pods, kept up to date by lists and changes of them."""

from __future__ import annotations

from flk import targets
from flk.kube import Changed, Listed, Object
from flk.observe.client import JobClient
from flk.observe.observation import Observation


class JobCache:
    """One job and its pods. The job has the UID, or is the first that is seen under the name."""

    def __init__(self, client: JobClient, name: str, uid: str | None, target: targets.Target) -> None:
        self.uid = uid
        self._client, self._name, self._target = client, name, target
        self._job: Object | None = None  # as it was seen last
        self._gone: float | None = None  # when it was seen to be deleted
        self._name_reused = False
        self._pods: dict[str, Object] = {}
        self._replaced_pods: dict[str, Object] = {}

    def take_job(self, change: Listed | Changed) -> None:
        """Apply a list of the jobs of this name, or a change of one."""
        items = change.items if isinstance(change, Listed) else [] if change.deleted else [change.item]
        if self.uid is None and items:
            self.uid = items[0]["metadata"]["uid"]
        own = [item for item in items if item["metadata"]["uid"] == self.uid]
        self._name_reused = self._name_reused or (bool(items) and not own)
        if isinstance(change, Changed) and change.deleted and change.item["metadata"]["uid"] != self.uid:
            return
        if own:
            self._job, self._gone = {**own[0], "kind": self._target.kind}, None
        elif self._gone is None:
            self._gone = self._client.now()

    def take_pods(self, change: Listed | Changed) -> None:
        """Apply a list of the pods of jobs of this name, or a change of one."""
        if isinstance(change, Changed):
            self._set_pod(change.item["metadata"]["name"], None if change.deleted else change.item, change.item)
            return
        listed = {item["metadata"]["name"]: item for item in change.items}
        for name in {**self._pods, **listed}:
            self._set_pod(name, listed.get(name))

    def observed(self) -> Observation:
        """Return the job as it is now."""
        pods = [pod for pod in self._pods.values() if self._owns(pod)]
        replaced = {name: pod for name, pod in self._replaced_pods.items() if self._owns(pod)}
        time, gone, reused = self._client.now(), self._gone, self._name_reused
        return Observation(self._job, pods, time, replaced_pods=replaced, gone=gone, name_reused=reused)

    def _set_pod(self, name: str, new: Object | None, last: Object | None = None) -> None:
        """Store a pod under its name, or remove it (``new`` is None), and remember the one that it replaces."""
        old = last if new is None and last is not None else self._pods.get(name)
        if old is not None and (new is None or new["metadata"]["uid"] != old["metadata"]["uid"]):
            self._replaced_pods[name] = old
        if new is None:
            self._pods.pop(name, None)
        else:
            self._pods[name] = new

    def _owns(self, pod: Object) -> bool:
        created = self._job["metadata"].get("creationTimestamp") if self._job else None
        return self.uid is None or self._target.owns(pod, self.uid, self._name, created)
