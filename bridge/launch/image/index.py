"""A package index: PEP 691 (JSON) or PEP 503 (HTML), over HTTP or in a folder (file://)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from bridge.artifacts import file_digest
from bridge.errors import UserError, WorkFailedError

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
TRIES = 4
TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True)
class File:
    """One file that an index lists."""

    name: str
    url: str
    sha256: str
    """Empty if the index does not say."""
    yanked: bool
    size: int
    """Bytes; 0 if the index does not say."""


def index_url() -> str:
    """The index of this machine: $UV_DEFAULT_INDEX, $PIP_INDEX_URL, pip's own settings, else PyPI."""
    chosen = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL")
    if not chosen:
        pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        chosen = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    return chosen or "https://pypi.org/simple"


def request(url: str, **headers: str) -> Request:
    """A request for `url`, whose user and password, if it has them, go into a header."""
    parts = urlsplit(url)
    if parts.username is not None:
        word = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(word.encode()).decode()
    return Request(shown(url), headers=headers)


def shown(url: str) -> str:
    """An address without user and password, as it may stand in messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def attempt(url: str, use: Callable[[HTTPResponse], Any], headers: Callable[[], dict[str, str]]) -> Any:
    """`use` of the answer; what may pass by itself (a lost connection, an overloaded server) is tried again.

    Raises:
        HTTPError: the server says no.
        WorkFailedError: it cannot be reached, or fails each time.
    """
    for number in range(1, TRIES + 1):
        try:
            with urlopen(request(url, **headers()), timeout=TIMEOUT) as answer:
                return use(answer)
        except HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise
            reason: object = error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
        if number < TRIES:
            time.sleep(2.0 ** (number - 2))
    raise WorkFailedError(f"{shown(url)}: {reason} ({TRIES} tries)")


@dataclass(frozen=True)
class Index:
    """An index by its address, such as https://pypi.org/simple."""

    url: str

    def files(self, package: str) -> list[File]:
        """All files of a package (its name as locks spell it); none if the index does not know it.

        Raises WorkFailedError when the index cannot be asked.
        """
        page = f"{self.url.rstrip('/')}/{package}/"
        if page.startswith("file:"):
            page += "index.html"
            if not Path(unquote(urlsplit(page).path)).is_file():
                return []

        def read(answer: HTTPResponse) -> list[File]:
            kind = answer.headers.get_content_type()
            text = answer.read().decode()
            # Where the answer came from, not where it was asked: links are relative to that.
            return from_json(text, answer.url) if kind.endswith("json") else from_html(text, answer.url)

        try:
            found: list[File] = attempt(page, read, lambda: {"Accept": ACCEPT})
        except HTTPError as error:
            if error.code in (404, 410):
                return []
            raise WorkFailedError(f"{shown(page)}: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise WorkFailedError(f"{shown(page)}: is no page of a package index: {error}") from None
        return [_with_login(file, self.url) for file in found]


def _with_login(file: File, index: str) -> File:
    """The same file, asked for as the index is if it lies on the same server."""
    ours, theirs = urlsplit(index), urlsplit(file.url)
    if "@" not in ours.netloc or ours.netloc.rpartition("@")[2] != theirs.netloc:
        return file
    return File(file.name, urlunsplit(theirs._replace(netloc=ours.netloc)), file.sha256, file.yanked, file.size)


def from_json(text: str, page: str) -> list[File]:
    """The files of a PEP 691 page."""
    return [
        File(
            item["filename"],
            urljoin(page, item["url"]),
            item["hashes"].get("sha256", ""),
            item.get("yanked", False) is not False,
            item.get("size") or 0,
        )
        for item in json.loads(text)["files"]
    ]


def from_html(text: str, page: str) -> list[File]:
    """The files of a PEP 503 page."""

    class Reader(HTMLParser):
        found: list[File] = []  # noqa: RUF012 (this class is made anew for each page)

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            attributes = dict(attrs)
            if tag == "a" and attributes.get("href"):
                url, fragment = urldefrag(urljoin(page, attributes["href"]))
                name = unquote(urlsplit(url).path.rpartition("/")[2])
                sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
                self.found.append(File(name, url, sha256, "data-yanked" in attributes, 0))

    reader = Reader()
    reader.feed(text)
    return reader.found


def download(file: File, folder: Path, report: Callable[[int], object]) -> Path:
    """Put a file into a folder under its name, goes on where an earlier try stopped, and checks its SHA-256.

    `report` is given the bytes as they come. A file appears under its name only when it is whole and right.

    Raises:
        UserError: the index gives a name that is no plain file name.
        WorkFailedError: it cannot be fetched, or is not what it should be.
    """
    if not file.name or {"/", "\\", "\0"} & set(file.name) or file.name.startswith("."):
        raise UserError(f"the index lists a file with the name {file.name!r}, which cannot be a file here")
    target, part = folder / file.name, folder / f".{file.name}.part"
    if target.is_file() and file_digest(target) == file.sha256:
        report(target.stat().st_size)
        return target

    def have() -> int:
        return part.stat().st_size if part.exists() else 0

    def receive(answer: HTTPResponse) -> None:
        begin = have() if answer.status == 206 else 0
        with part.open("ab") as out:
            out.truncate(begin)
            while block := answer.read(1 << 20):
                out.write(block)
                report(len(block))
        expected = answer.headers.get("Content-Length")
        if expected is not None and have() < begin + int(expected):
            raise HTTPException("the connection ended early")

    report(have())
    try:
        attempt(file.url, receive, lambda: {"Range": f"bytes={have()}-"} if have() else {})
    except HTTPError as error:
        if error.code != 416:  # 416: all of it is here already
            raise WorkFailedError(f"{shown(file.url)}: {error}") from None
    found = file_digest(part)
    if found != file.sha256:
        part.unlink()
        raise WorkFailedError(f"{shown(file.url)}: expected sha256 {file.sha256} (the lock), found {found}")
    part.replace(target)
    return target
