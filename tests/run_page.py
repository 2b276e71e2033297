"""The data embedded in a run.html."""

import base64
import gzip
import json
import re
from typing import Any

_DATA = re.compile(r'<script id="data" type="application/octet-stream">([A-Za-z0-9+/=]*)</script>')


def unpacked(page: str) -> dict[str, Any]:
    """The responses of the page's API by path."""
    [data] = _DATA.findall(page)
    responses: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(data)))
    return responses
