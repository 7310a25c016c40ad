"""Who a client of S3 is, as AWS's own tools find it out: from the environment, or from a profile in ``~/.aws``.

obstore knows the environment and the roles of machines and containers. The files of profiles (keys, SSO, roles to
assume, endpoints) are read by botocore, which s3fs brings along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

_LASTS = timedelta(minutes=15)
"""How long keys are used before botocore is asked again, which knows when they expire."""
_IS_SECRET = re.compile(r"(?i)(key|secret|token|sas|password)(?!.*_file$)")
_SHORTEST_SECRET = 8
ENDPOINT = {"endpoint", "endpoint_url"}
"""How an option is called that says which server it is; each may have ``aws_`` before it."""
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


def secrets_in(options: Mapping[str, Any]) -> list[str]:
    """The texts that no message may have in it, of these options and of the environment."""
    clouds = {name: text for name, text in os.environ.items() if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    secret = [text for name, text in {**clouds, **options}.items() if _IS_SECRET.search(name) and isinstance(text, str)]
    return sorted({text for text in secret if len(text) >= _SHORTEST_SECRET}, key=len, reverse=True)


def of_aws(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a client of S3 needs besides those given.

    Raises:
        ValueError: A profile is named that is not there, or botocore is missing, which reads it.
    """
    own = {name.lower().removeprefix("aws_") for name in given}
    options: dict[str, Any] = {}
    environment = os.environ
    if not own & {"access_key_id", "credential_provider", "skip_signature"} and _has_profile():
        options = _of_profile()
    # obstore does not know the first of the two.
    if endpoint := environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL"):
        options["endpoint"] = endpoint
    if own & ENDPOINT:
        options.pop("endpoint", None)
    if "region" in own or environment.get("AWS_REGION"):
        options.pop("region", None)
    return options


def _has_profile() -> bool:
    if os.environ.get("AWS_PROFILE"):
        return True
    files = (os.environ.get(name, usual) for name, usual in _FILES.items())
    return not os.environ.get("AWS_ACCESS_KEY_ID") and any(os.path.exists(os.path.expanduser(file)) for file in files)


def _of_profile() -> dict[str, Any]:
    named = os.environ.get("AWS_PROFILE")
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        if named:
            raise ValueError(f"AWS_PROFILE is {named}, and what reads it is missing: pip install botocore") from error
        return {}
    session = botocore.session.Session()
    try:
        keys, scoped = session.get_credentials(), session.get_scoped_config()
    except botocore.exceptions.BotoCoreError as error:
        raise ValueError(f"the profile cannot be read: {error}") from error
    services = session.full_config.get("services", {}).get(scoped.get("services"), {})
    endpoint = services.get("s3", {}).get("endpoint_url") or scoped.get("endpoint_url")
    options = {"region": session.get_config_variable("region"), "endpoint": endpoint}
    if keys is not None and keys.method not in ("iam-role", "container-role"):
        options["credential_provider"] = _Provider(keys)
    return {name: value for name, value in options.items() if value}


class _Provider:
    """What obstore asks for keys."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys

    def __call__(self) -> dict[str, Any]:
        frozen = self._keys.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _LASTS,
        }
