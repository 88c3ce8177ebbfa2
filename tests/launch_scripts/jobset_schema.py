"""The schema of a JobSet manifest (jobset.x-k8s.io/v1alpha2), closed: an unknown field is an error.

What lies inside a Job's template is Kubernetes' own and is checked against the classes of its
Python client.
"""

from __future__ import annotations

from typing import Any

_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_STRING_MAP = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_METADATA = _closed(
    name=_NAME, namespace=_NAME, generateName=_NAME, labels=_STRING_MAP, annotations=_STRING_MAP
)

_JOB_TEMPLATE = _closed(("spec",), metadata=_METADATA, spec={"type": "object"})

_REPLICATED_JOB = _closed(
    ("name", "template"),
    name=_NAME,
    groupName=_NAME,
    replicas=_COUNT,
    template=_JOB_TEMPLATE,
    dependsOn={
        "type": "array",
        "maxItems": 5,
        "items": _closed(("name", "status"), name=_NAME, status={"enum": ["Ready", "Complete"]}),
    },
)

_FAILURE_ACTIONS = [
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
]

_FAILURE_RULE = _closed(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": _FAILURE_ACTIONS},
    onJobFailureReasons=_STRINGS,
    onJobFailureMessagePatterns=_STRINGS,
    targetReplicatedJobs=_STRINGS,
)

_SPEC = _closed(
    ("replicatedJobs",),
    replicatedJobs={"type": "array", "items": _REPLICATED_JOB, "minItems": 1},
    network=_closed(
        enableDNSHostnames={"type": "boolean"},
        subdomain=_NAME,
        publishNotReadyAddresses={"type": "boolean"},
    ),
    successPolicy=_closed(
        ("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=_STRINGS
    ),
    failurePolicy=_closed(
        maxRestarts=_COUNT,
        restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
        rules={"type": "array", "items": _FAILURE_RULE},
    ),
    startupPolicy=_closed(
        ("startupPolicyOrder",), startupPolicyOrder={"enum": ["AnyOrder", "InOrder"]}
    ),
    suspend={"type": "boolean"},
    coordinator=_closed(("replicatedJob",), replicatedJob=_NAME, jobIndex=_COUNT, podIndex=_COUNT),
    managedBy={"type": "string", "maxLength": 63},
    ttlSecondsAfterFinished=_COUNT,
    volumeClaimPolicies={"type": "array", "maxItems": 50, "items": {"type": "object"}},
)

JOBSET = _closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_METADATA | {"required": ["name"]},
    spec=_SPEC,
)
