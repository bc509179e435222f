"""The NetworkPolicy of the chart: which pods it lets reach which, by the rules of Kubernetes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flk.manifest import Bundle, render
from flk.spec.job import validated
from flk_runtime.contract import user_env
from tests.support.chart import JOB, template

OTHERS = {"a pod of something else": {"app": "web"}, "no labels": {}}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def reaches(policy: dict[str, Any], labels: dict[str, str], port: int) -> bool:
    """Whether a pod with these labels, in the namespace of the policy, reaches the policy's pods at a TCP port."""
    return any(
        (not rule.get("ports") or {"protocol": "TCP", "port": port} in rule["ports"])
        and any(set(peer) == {"podSelector"} and selects(peer["podSelector"], labels) for peer in rule["from"])
        for rule in policy["spec"]["ingress"]
    )


def scraped(relabelings: list[dict[str, Any]], port_name: str, address: str) -> str | None:
    """The address that Prometheus reads for a port that a pod declares; None if it drops this port."""
    found = {"__meta_kubernetes_pod_container_port_name": port_name, "__address__": address}
    for rule in relabelings:
        (source,) = rule["sourceLabels"]
        match = re.fullmatch(rule["regex"], found[source])
        if rule["action"] == "keep" and not match:
            return None
        if rule["action"] == "replace" and match:
            found[rule["targetLabel"]] = rule["replacement"].replace("$1", match[1])
    return found["__address__"]


def labels_of_pods(name: str) -> dict[str, str]:
    """The labels of the pods of a job that `flk submit` creates."""
    job = render(validated({"name": name, "command": "train.py", "replicas": 2}), Bundle())[0]
    labels: dict[str, str] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["labels"]
    return labels


@pytest.mark.promise("Clusters: The pods of a job are reached by nobody else")
def test_pods_of_the_job_reach_each_other_and_nobody_else_does() -> None:
    chart = template({"job": JOB | {"replicas": 2}, "networkPolicy": {"enabled": True}})
    policy = chart.one("NetworkPolicy")
    pods = chart.one("PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["labels"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert selects(policy["spec"]["podSelector"], pods)
    for port in (29400, 1, 65535):
        assert reaches(policy, pods, port)
        for labels in (labels_of_pods("other"), *OTHERS.values()):
            assert not reaches(policy, labels, port)
    assert not selects(policy["spec"]["podSelector"], labels_of_pods("other"))


def test_without_a_job_the_policy_is_for_all_jobs_of_the_namespace() -> None:
    policy = template({"networkPolicy": {"enabled": True}}).one("NetworkPolicy")
    for name in ("one", "two"):
        assert selects(policy["spec"]["podSelector"], labels_of_pods(name))
        assert reaches(policy, labels_of_pods(name), 29400)
    for labels in OTHERS.values():
        assert not selects(policy["spec"]["podSelector"], labels)
        assert not reaches(policy, labels, 29400)


def test_egress_is_restricted_only_on_request() -> None:
    storage = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"protocol": "TCP", "port": 443}]}
    values = {"enabled": True, "restrictEgress": True, "egress": [storage]}
    chart = template({"job": JOB, "networkPolicy": values})
    spec = chart.one("NetworkPolicy")["spec"]
    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "flk", "flk.dev/job": "gpt"}}}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"][0] == {"to": [own]}
    assert {port["port"] for port in spec["egress"][1]["ports"]} == {53}
    assert spec["egress"][2:] == [storage]


def test_more_may_be_let_in() -> None:
    monitoring = {"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}], "ports": [{"port": 9400}]}
    chart = template({"networkPolicy": {"enabled": True, "ingress": [monitoring]}})
    assert chart.one("NetworkPolicy")["spec"]["ingress"][1:] == [monitoring]


@pytest.mark.promise("Causes: flk stacks, top, profile and metrics show a running job")
def test_a_pod_monitor_finds_the_metrics_of_the_pods_and_the_policy_lets_it_in() -> None:
    values = {"podMonitor": {"enabled": True, "labels": {"release": "p"}}, "networkPolicy": {"enabled": True}}
    chart = template({"job": JOB | {"env": {"A": "b"}}, **values})
    monitor = chart.one("PodMonitor")
    pod = chart.one("PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert selects(monitor["spec"]["selector"], pod["metadata"]["labels"])
    assert monitor["metadata"]["labels"]["release"] == "p"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    env = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
    assert env[user_env.METRICS_PORT] == "9400"
    assert env["A"] == "b"
    assert endpoint.keys().isdisjoint({"port", "portNumber", "targetPort"})  # they choose among the ports of the pod
    (port,) = pod["spec"]["containers"][0]["ports"]
    assert scraped(endpoint["relabelings"], port["name"], "10.0.0.7:29400") == "10.0.0.7:9400"
    assert scraped(endpoint["relabelings"], port["name"], "[fd00::7]:29400") == "[fd00::7]:9400"
    assert scraped(endpoint["relabelings"], "of-a-sidecar", "10.0.0.7:80") is None
    assert endpoint["honorLabels"] is True  # else the job of a metric is the monitor's
    assert {"ports": [{"protocol": "TCP", "port": 9400}]} in chart.one("NetworkPolicy")["spec"]["ingress"]
    chart = template({"job": JOB | {"env": {"FLK_METRICS_PORT": "9500"}}, **values})
    (endpoint,) = chart.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped(endpoint["relabelings"], port["name"], "10.0.0.7:29400") == "10.0.0.7:9500"
