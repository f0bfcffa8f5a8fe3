"""The ground floor: files, text of messages, plug-ins. Imports nothing of ALTO but its errors."""

from alto.base.files import (
    MAX_JSON_BYTES,
    LockFile,
    cache_home,
    is_disk_full,
    is_number,
    note_resumption,
    open_regular,
    read_bytes,
    read_json,
    replace_file,
    resume_command,
    scratch_folder,
    strict_json,
    sync_folder,
    write_error,
    writing,
)
from alto.base.plugins import Registry, described, load_attribute, naming_errors
from alto.base.text import first_line, nearest_key, quoted

__all__ = [
    "MAX_JSON_BYTES",
    "LockFile",
    "Registry",
    "cache_home",
    "described",
    "first_line",
    "is_disk_full",
    "is_number",
    "load_attribute",
    "naming_errors",
    "nearest_key",
    "note_resumption",
    "open_regular",
    "quoted",
    "read_bytes",
    "read_json",
    "replace_file",
    "resume_command",
    "scratch_folder",
    "strict_json",
    "sync_folder",
    "write_error",
    "writing",
]
