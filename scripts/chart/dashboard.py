"""The Grafana dashboard of flk's jobs, from a table of its panels."""

from __future__ import annotations

from typing import Any, Final

from scripts.chart.text import compact_json

_JOB: Final = '{namespace="$namespace", job="$job"}'
_WIDTH, _HEIGHT = 8, 7  # of a panel, in a grid of 24 columns
# A row for each panel: its title, its unit in Grafana, and its queries with the names of their lines.
PANELS: Final = (
    ("Steps", "none", ((f"max(flk_step{_JOB})", "done"), (f"flk_total_steps{_JOB}", "of the job"),
                       (f"max(flk_saved_step{_JOB})", "saved"), (f"max(flk_stored_step{_JOB})", "in storage"))),
    ("Loss", "none", ((f"flk_loss{_JOB}", "attempt {{attempt}}"),)),
    ("Throughput", "none", ((f"flk_tokens_per_second{_JOB}", "tokens/s"),
                            (f"flk_samples_per_second{_JOB}", "samples/s"))),
    ("Time of a step", "s", ((f"flk_median_step_seconds{_JOB}", "median rank"),
                             (f"flk_slowest_work_seconds{_JOB}", "work of rank {{rank}}, the slowest"))),
    ("Shares of the time", "percentunit", ((f"flk_mfu_ratio{_JOB}", "MFU"),
                                           (f"flk_communication_ratio{_JOB}", "communication"),
                                           (f"flk_data_wait_ratio{_JOB}", "waits for data"),
                                           (f"flk_goodput_ratio{_JOB}", "goodput"))),
    ("Where the time went", "s", ((f"flk_time_seconds{_JOB}", "{{cause}}"),)),
    ("Attempts", "none", ((f"flk_attempts_total{_JOB}", "attempts"), (f"flk_restarts_total{_JOB}", "restarts"),
                          (f"flk_disruptions_total{_JOB}", "disruptions"), (f"flk_slow_ranks{_JOB}", "slow ranks"))),
    ("Failures by kind", "none", ((f"flk_failures_total{_JOB} > 0", "{{kind}}"),)),
    ("Makes progress", "bool_yes_no", ((f"flk_making_progress{_JOB}", "progress"),)),
    ("GPUs are busy", "percentunit", ((f"flk_pod_gpu_busy_ratio{_JOB}", "{{pod}}"),)),
)  # fmt: skip


def dashboard() -> str:
    """Return the dashboard as JSON, as Grafana imports it."""
    return (
        compact_json(
            {
                "uid": "flk",
                "title": "flk: training jobs",
                "tags": ["flk"],
                "schemaVersion": 39,
                "editable": True,
                "refresh": "30s",
                "time": {"from": "now-6h", "to": "now"},
                "templating": {
                    "list": [
                        {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                        _variable("namespace", "Namespace", "label_values(flk_attempts_total, namespace)"),
                        _variable("job", "Job", 'label_values(flk_attempts_total{namespace="$namespace"}, job)'),
                    ]
                },
                "panels": [_panel(number) for number in range(len(PANELS))],
            }
        )
        + "\n"
    )


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }


def _panel(number: int) -> dict[str, Any]:
    title, unit, queries = PANELS[number]
    columns = 24 // _WIDTH
    source = {"type": "prometheus", "uid": "$source"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": number % columns * _WIDTH, "y": number // columns * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"showPoints": "never"}}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": query, "legendFormat": name}
            for place, (query, name) in enumerate(queries)
        ],
    }
