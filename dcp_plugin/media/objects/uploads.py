"""Listings of an S3 bucket that obstore does not make, and botocore, which comes with s3fs, does.

These are uploads in parts that were neither finished nor aborted, and objects beside those of which obstore refuses the
keys. Where botocore is not installed, a rule of the bucket's life cycle gives the bytes of uploads back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("dcp_plugin")


def unfinished(url: str, config: Mapping[str, Any], prefix: str) -> list[str]:
    """The keys of those of an S3 bucket below a prefix; none where the store does not say.

    Args:
        config: As obstore has it.
    """
    keys: list[str] = []
    with _client(url, config, prefix) as client:
        keys += (item["Key"] for item in _listed(client, url, prefix))
    return keys


def abort(url: str, config: Mapping[str, Any], prefix: str, tokens: Collection[str]) -> None:
    """Abort those with one of ``tokens`` in their keys. What fails is left to the life cycle."""
    with _client(url, config, prefix) as client:
        for item in _listed(client, url, prefix):
            if any(token in item["Key"] for token in tokens):
                client.abort_multipart_upload(Bucket=_bucket(url), Key=item["Key"], UploadId=item["UploadId"])


def pages(url: str, config: Mapping[str, Any], prefix: str, delimiter: str = "") -> Iterator[Any]:
    """Yield the pages of a listing, as botocore returns them.

    Raises:
        ImportError: botocore is not installed.
        Exception: Whatever botocore raises.
    """
    below = f"{prefix}/" if prefix else ""
    paginator = _connected(config).get_paginator("list_objects_v2")
    yield from paginator.paginate(Bucket=_bucket(url), Prefix=below, Delimiter=delimiter)


def _bucket(url: str) -> str:
    return url.partition("://")[2]


def _listed(client: Any, url: str, prefix: str) -> Iterator[Any]:
    if client is None:
        return
    below = f"{prefix}/" if prefix else ""
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=_bucket(url), Prefix=below):
        yield from page.get("Uploads", ())


@contextmanager
def _client(url: str, config: Mapping[str, Any], prefix: str) -> Iterator[Any]:
    """botocore's; None where it is not installed. The block ends at the first thing that fails."""
    try:
        try:
            client = _connected(config)
        except ImportError:
            client = None
        yield client
    except Exception as error:  # whatever it is, a save need not fail of it; its text may tell the configuration
        logger.debug("unfinished uploads below %s/%s cannot be seen to: %s", url, prefix, type(error).__name__)


def _connected(config: Mapping[str, Any]) -> Any:
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
