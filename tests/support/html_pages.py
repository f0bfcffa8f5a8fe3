"""HTML pages as a browser would see them."""

from __future__ import annotations

import json
from html.parser import HTMLParser

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
FETCHING = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """The parts of a page that a browser would see: tags, attributes that fetch, text outside scripts, and the
    scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.policy = ""
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in FETCHING]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        if tag in ("script", "style"):
            self._inside = tag
            self.scripts += [""] if tag == "script" else []

    def handle_endtag(self, tag):
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data.replace("\u00a0", " ")

    @property
    def figures(self):
        return json.loads(self.scripts[1])
