"""Uploads in parts that were neither finished nor aborted. obstore cannot list them; botocore can, which comes with
s3fs. Where that is not installed, a rule of the bucket's life cycle is what gives their bytes back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("dcp_plugin")


def abort(url: str, config: Mapping[str, Any], prefix: str, token: str) -> None:
    """Abort those of an S3 bucket below a prefix with ``token`` in their keys. What fails is left to the life cycle.

    Args:
        config: As obstore has it.
    """
    try:
        from botocore.config import Config
        from botocore.session import Session
    except ImportError:
        return
    try:
        given = {
            "aws_access_key_id": config.get("access_key_id"),
            "aws_secret_access_key": config.get("secret_access_key"),
            "aws_session_token": config.get("token") or config.get("session_token"),
            "region_name": config.get("region"),
            "endpoint_url": config.get("endpoint"),
        }
        style = "virtual" if str(config.get("virtual_hosted_style_request")).lower() == "true" else "path"
        patience: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
        client: Any = Session().create_client(
            "s3",
            config=Config(s3={"addressing_style": style}, **patience),
            **{name: one for name, one in given.items() if one},
        )
        bucket = url.partition("://")[2]
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
            for one in page.get("Uploads", ()):
                if token in one["Key"]:
                    client.abort_multipart_upload(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
    except Exception as error:  # whatever it is, a save need not fail of it; its text may tell the configuration
        logger.debug("unfinished uploads below %s/%s cannot be aborted: %s", url, prefix, type(error).__name__)
