"""What a damaged or hostile pickle raises, in Python's unpickler, torch's or a zip archive.

Whoever reads pickles turns all of it into one line that names the file.
"""

import pickle
import struct
import zipfile

# What Python's documentation names, and what mutated files were seen to lead to: a foreign
# persistent id asserts, an extension code is a ValueError, a huge memo index a MemoryError.
UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
