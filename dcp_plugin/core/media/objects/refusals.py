"""Texts of errors of a store: its own words without secrets, and the way out."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dcp_plugin.core.paths import StoreOptions

_SECRET = re.compile(
    r"(?i)\b((?:x-amz-[\w-]*|sig|signature|(?<!expired)(?<!invalid)token|secret|password|\w*_key|authorization)\s*[=:]\s*)[^\s&\"',}]+"
)
_ROLE_SERVICE = "169.254.169.254"
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"')]*")
_NEW_CREDENTIALS = "Give this job credentials that are valid: by the environment, a profile or storage_options"
_REFUSALS = (
    (
        ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"),
        errno.ENODEV,
        "There is no such bucket: create it, or correct the URL",
    ),
    (
        ("RequestTimeTooSkewed", "RequestExpired"),
        errno.EACCES,
        "The clock of this machine is wrong: set it, for example by chronyd or systemd-timesyncd",
    ),
    (
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "ExpiredAuthenticationToken"),
        errno.EACCES,
        f"The credentials have expired. {_NEW_CREDENTIALS}",
    ),
    (
        ("InvalidAccessKeyId", "InvalidToken", "AuthenticationFailed", "InvalidAuthenticationInfo"),
        errno.EACCES,
        f"The store does not know these credentials. {_NEW_CREDENTIALS}",
    ),
    (
        ("SignatureDoesNotMatch",),
        errno.EACCES,
        f"The secret key is not the one of the access key. {_NEW_CREDENTIALS}",
    ),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "redirect without"),
        errno.EIO,
        (
            "The bucket is in another region, or the endpoint is not its own: set AWS_REGION and AWS_ENDPOINT_URL, or "
            "region and endpoint in storage_options"
        ),
    ),
    (
        (
            "AccessDenied",
            "AuthorizationFailure",
            "AuthorizationPermissionMismatch",
            "403 Forbidden",
            "401 Unauthorized",
        ),
        errno.EACCES,
        (
            "These credentials may not do that: it takes the rights to list the bucket, and to read, write and delete "
            "objects in it"
        ),
    ),
)
"""Words in the answer of a store, the error number, and the way out. The first row that matches counts."""
_IS_SECRET = re.compile(r"(?i)(key|secret|token|sas|password)(?!.*_file$)")
_SHORTEST_SECRET, _SHORTEST_TEXT = 8, 4


def refusal(error: Exception, text: str) -> tuple[int, str]:
    """Return the number of an error, and its text with the way out, if that is known."""
    for words, number, advice in _REFUSALS:
        if any(word in text for word in words):
            return number, f"{text}. {advice}"
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT, os.strerror(errno.ENOENT)
    return errno.EIO, text


def secrets_in(options: Mapping[str, Any]) -> list[str]:
    """Return the texts of these options and of the environment that no message may have in it."""
    clouds = {name: text for name, text in os.environ.items() if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    secret = [text for name, text in {**clouds, **options}.items() if _IS_SECRET.search(name) and isinstance(text, str)]
    return sorted({text for text in secret if len(text) >= _SHORTEST_SECRET}, key=len, reverse=True)


def texts_in(options: Any) -> list[str]:
    """Return all texts of options: a message about them may quote a secret that is in the wrong place."""
    if isinstance(options, str):
        return [options] if len(options) >= _SHORTEST_TEXT else []
    values = options.values() if isinstance(options, (Mapping, StoreOptions)) else ()
    return [text for item in values for text in texts_in(item)]


def error_text(error: Exception, secrets: Iterable[str]) -> str:
    """Return the text of an error of a store, on one line, without the secrets of a request."""
    text = str(error).partition("\n\nDebug source:")[0]
    body = re.search(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", text, re.DOTALL)
    text = re.sub(r"\ufeff?<(\?xml|Error).*", "", text, flags=re.DOTALL)
    if _ROLE_SERVICE in text:
        return (
            "no credentials were found in the environment or a profile, and this machine has no role that gives some. "
            + _NEW_CREDENTIALS
        )
    text = text.rpartition("non-2xx status code: ")[2]
    text = _SECRET.sub(r"\1…", _QUERY.sub(r"\1?…", text))
    if body:
        text += f"{body[1]}: {body[2]}" if body[2] else body[1]
    for secret in secrets:
        text = text.replace(secret, "…")
    return " ".join(text.split()).rstrip(".:")[:1000]
