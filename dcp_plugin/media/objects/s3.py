"""Parts of S3 that botocore knows and obstore does not: profiles, unfinished uploads, and keys that are no paths.

obstore knows the environment and the roles of machines and containers. The files in ``~/.aws`` (keys, SSO, roles to
assume, endpoints) are read by botocore, which comes with s3fs. Where botocore is not installed, a rule of the bucket's
life cycle has to delete the uploads in parts that were never completed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

logger = logging.getLogger("dcp_plugin")

_LASTS = timedelta(minutes=15)
"""How long keys are used before the next question to botocore, which knows when they expire."""
ENDPOINT = {"endpoint", "endpoint_url"}
"""Names of the option for the address of the server; each may have ``aws_`` before it."""
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


def further_options(client_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a client needs besides these, as AWS's own tools choose them.

    Raises:
        ValueError: The environment names a profile that does not exist, or botocore, which reads it, is missing.
    """
    own = {name.lower().removeprefix("aws_") for name in client_options}
    options: dict[str, Any] = {}
    if not own & {"access_key_id", "credential_provider", "skip_signature"} and _has_profile():
        options = _of_profile()
    # obstore does not know the first of the two.
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        options["endpoint"] = endpoint
    if own & ENDPOINT:
        options.pop("endpoint", None)
    if "region" in own or os.environ.get("AWS_REGION"):
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
            raise ValueError(f"AWS_PROFILE is {named}, and reading it needs botocore: pip install botocore") from error
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
        options["credential_provider"] = lambda: _frozen(keys)
    return {name: value for name, value in options.items() if value}


def _frozen(keys: Any) -> dict[str, Any]:
    """Return botocore's keys as obstore takes them."""
    frozen = keys.get_frozen_credentials()
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.now(UTC) + _LASTS,
    }


def unfinished_uploads(url: str, config: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the keys of the unfinished uploads of a bucket below a prefix; none if the store does not list them.

    Args:
        config: The configuration of obstore's store.
    """
    keys: list[str] = []
    with _failures_logged(url, prefix):
        keys += (item["Key"] for item in _uploads(_client(config), url, prefix))
    return keys


def abort_uploads(url: str, config: Mapping[str, Any], prefix: str, tokens: Collection[str]) -> None:
    """Abort the unfinished uploads with one of ``tokens`` in their keys, up to the first failure."""
    with _failures_logged(url, prefix):
        client = _client(config)
        for item in _uploads(client, url, prefix):
            if any(token in item["Key"] for token in tokens):
                client.abort_multipart_upload(Bucket=_bucket(url), Key=item["Key"], UploadId=item["UploadId"])


def pages(url: str, config: Mapping[str, Any], prefix: str, delimiter: str = "") -> Iterator[Any]:
    """Yield the pages of a listing, as botocore returns them.

    Raises:
        ImportError: botocore is not installed.
        Exception: Whatever botocore raises.
    """
    paginator = _client(config).get_paginator("list_objects_v2")
    yield from paginator.paginate(Bucket=_bucket(url), Prefix=_folder(prefix), Delimiter=delimiter)


def _uploads(client: Any, url: str, prefix: str) -> Iterator[Any]:
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=_bucket(url), Prefix=_folder(prefix)):
        yield from page.get("Uploads", ())


def _bucket(url: str) -> str:
    return url.partition("://")[2]


def _folder(prefix: str) -> str:
    return f"{prefix}/" if prefix else ""


@contextmanager
def _failures_logged(url: str, prefix: str) -> Iterator[None]:
    """End the block at the first failure, a missing botocore too: no save needs these requests."""
    try:
        yield
    except Exception as error:  # its text may have secrets of the configuration
        logger.debug("cannot abort unfinished uploads below %s/%s: %s", url, prefix, type(error).__name__)


def _client(config: Mapping[str, Any]) -> Any:
    """Return botocore's client. Raises ImportError where botocore is not installed."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    settings = {
        "aws_access_key_id": config.get("access_key_id"),
        "aws_secret_access_key": config.get("secret_access_key"),
        "aws_session_token": config.get("token") or config.get("session_token"),
        "region_name": config.get("region"),
        "endpoint_url": config.get("endpoint"),
    }
    style = "virtual" if str(config.get("virtual_hosted_style_request")).lower() == "true" else "path"
    more: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
    if str(config.get("skip_signature")).lower() == "true":
        more["signature_version"] = UNSIGNED
    return Session().create_client(
        "s3",
        config=Config(s3={"addressing_style": style}, **more),
        **{name: item for name, item in settings.items() if item},
    )
