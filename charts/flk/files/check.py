"""`helm test`: check that the cluster serves what jobs become, and that the release's ServiceAccount has its rights."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

RULES = json.loads(sys.argv[1])  # those of the Role
TARGETS = json.loads(sys.argv[2])  # what the release's jobs may become, with apiVersion and kind
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def read(name):
    with open(f"{ACCOUNT}/{name}", encoding="utf-8") as file:
        return file.read().strip()


def ask(path, body=None):
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    request = urllib.request.Request(
        f"https://{f'[{host}]' if ':' in host else host}:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {read('token')}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    with urllib.request.urlopen(request, timeout=20, context=context) as reply:  # noqa: S310 - always https
        return json.load(reply)


def served(target):
    try:
        kinds = [resource["kind"] for resource in ask(f"/apis/{target['apiVersion']}")["resources"]]
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        kinds = []
    return target["kind"] in kinds


def allowed(group, resource, verb):
    name, _, subresource = resource.partition("/")
    attributes = {"namespace": read("namespace"), "group": group, "resource": name, "verb": verb}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**attributes, "subresource": subresource}},
    }
    return ask("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)["status"]["allowed"]


failures = []
for target in TARGETS:
    if not served(target):
        name = f"{target['kind']}s ({target['apiVersion']})"
        failures.append(f"the cluster does not serve {name}: {target['install'] or 'it is too old'}")
for rule in RULES:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            failures += [f"may not {verb} {resource}" for verb in rule["verbs"] if not allowed(group, resource, verb)]
for failure in failures:
    print(f"failed: {failure}", flush=True)
if failures:
    sys.exit(1)
kinds = ", ".join(f"{target['kind']}s" for target in TARGETS)
print(f"{kinds} are served, and this release's ServiceAccount may do all that flk needs")
