"""Parts of S3 that botocore knows and obstore does not: profiles, unfinished uploads, and keys that are no paths.

obstore knows the environment and the roles of machines and containers. botocore reads the files in ``~/.aws``: keys,
SSO and roles to assume for obstore's own provider of credentials; region and endpoint here. It comes with boto3, which
that provider imports. Where it is not installed, a rule of the bucket's life cycle has to delete the uploads in parts
that were never completed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from dcp_plugin.core.errors import logger

_LASTS = timedelta(minutes=15)
"""Time for which keys are used before botocore, which knows when they expire, is asked again."""
ENDPOINT = {"endpoint", "endpoint_url"}
"""Names of the option for the address of the server; each may have ``aws_`` before it."""
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


def further_options(client_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a client needs besides these, as AWS's own tools choose them.

    Raises:
        ValueError: The environment names a profile that does not exist, or boto3, which reads it, is missing.
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
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        if named:
            raise ValueError(f"AWS_PROFILE is {named}, and reading it needs boto3: pip install boto3") from error
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
        options["credential_provider"] = Boto3CredentialProvider(session, ttl=_LASTS)
    return {name: value for name, value in options.items() if value}


class FurtherRequests:
    """Requests to a bucket that obstore does not make. One client of botocore makes them all: a new one takes 0.2 s.

    Args:
        config: The configuration of obstore's store.
    """

    def __init__(self, url: str, config: Mapping[str, Any]) -> None:
        self._url, self._config = url, config

    def unfinished_uploads(self, prefix: str) -> list[str]:
        """Return the keys of the unfinished uploads below a prefix; none if the store does not list them."""
        with self._failures_logged(prefix):
            return [item["Key"] for item in self._uploads(prefix)]
        return []

    def abort_uploads(self, prefix: str, tokens: Collection[str]) -> None:
        """Abort the unfinished uploads with one of ``tokens`` in their keys, up to the first failure."""
        with self._failures_logged(prefix):
            for item in self._uploads(prefix):
                if any(token in item["Key"] for token in tokens):
                    upload = {"Key": item["Key"], "UploadId": item["UploadId"]}
                    self._client.abort_multipart_upload(Bucket=self._bucket, **upload)

    def pages(self, prefix: str, delimiter: str = "") -> Iterator[Any]:
        """Yield the pages of a listing, as botocore returns them.

        Raises:
            ImportError: botocore is not installed.
            Exception: Whatever botocore raises.
        """
        return self._listed("list_objects_v2", prefix, Delimiter=delimiter)

    def _uploads(self, prefix: str) -> Iterator[Any]:
        for page in self._listed("list_multipart_uploads", prefix):
            yield from page.get("Uploads", ())

    def _listed(self, request: str, prefix: str, **arguments: str) -> Iterator[Any]:
        folder = f"{prefix}/" if prefix else ""
        return iter(self._client.get_paginator(request).paginate(Bucket=self._bucket, Prefix=folder, **arguments))

    @property
    def _bucket(self) -> str:
        return self._url.partition("://")[2]

    @contextmanager
    def _failures_logged(self, prefix: str) -> Iterator[None]:
        """End the block at the first failure, a missing botocore too: no save needs these requests."""
        try:
            yield
        except Exception as error:  # its text may have secrets of the configuration
            logger.debug("cannot abort unfinished uploads below %s/%s: %s", self._url, prefix, type(error).__name__)

    @functools.cached_property
    def _client(self) -> Any:
        """The client of botocore, which several threads may use. Raises ImportError where botocore is not installed."""
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.session import Session

        settings = {
            "aws_access_key_id": self._config.get("access_key_id"),
            "aws_secret_access_key": self._config.get("secret_access_key"),
            "aws_session_token": self._config.get("token") or self._config.get("session_token"),
            "region_name": self._config.get("region"),
            "endpoint_url": self._config.get("endpoint"),
        }
        style = "virtual" if str(self._config.get("virtual_hosted_style_request")).lower() == "true" else "path"
        more: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
        if str(self._config.get("skip_signature")).lower() == "true":
            more["signature_version"] = UNSIGNED
        return Session().create_client(
            "s3",
            config=Config(s3={"addressing_style": style}, **more),
            **{name: item for name, item in settings.items() if item},
        )
