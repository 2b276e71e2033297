"""JSON for display: NaN and infinity are null, and all text is ASCII."""

import json


def to_json(content: object) -> str:
    """The content as compact ASCII JSON, without line breaks. NaN and infinity are null."""
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))


def _finite(content: object) -> object:
    match content:
        case float():
            return content if content - content == 0 else None
        case dict():
            return {str(key): _finite(value) for key, value in content.items()}
        case list() | tuple():
            return [_finite(value) for value in content]
    return content
