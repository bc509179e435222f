"""Read the record that the launchers have archived of a job in a ConfigMap of its namespace."""

from __future__ import annotations

from typing import Final

from flk import labels
from flk.errors import FlkError
from flk.observe.client import JobClient
from flk.observe.observation import Observation, unnamed_pod
from flk.observe.resources import CONFIG_MAPS
from flk_runtime.contract.record import ArchivedRecord

FIRST_POD: Final = unnamed_pod(0)


def find_record(client: JobClient, name: str, uid: str | None = None) -> Observation | None:
    """Return the record that the launchers have archived of a job; None without one, and if it may not be read."""
    try:
        found = client.api.list_all(client.target(CONFIG_MAPS), {"labelSelector": f"{labels.RECORDS}=true"})[0]
    except FlkError:
        return None
    entries = [
        entry
        for config_map in found
        for text in (config_map.get("data") or {}).values()
        if (entry := ArchivedRecord.from_json(text)) and entry.job == name and uid in (None, entry.uid)
    ]
    if not entries:
        return None
    newest = max(entries, key=lambda entry: entry.updated)
    logs = {FIRST_POD: newest.lines}
    return Observation(None, time=newest.updated, record=newest.record, entry=newest, logs=logs)
