"""The parts that a protobuf message is written of.

The library takes longer to make a small message than a turn has time for: what
each turn sends is written straight into its wire form, of these.
"""


def field(tag: bytes, value: bytes) -> bytes:
    """Returns a field whose value has a length: text, bytes or a message."""
    size = len(value)
    return b"%b%c%b" % (tag, size, value) if size < 128 else tag + varint(size) + value


def varint(number: int) -> bytes:
    """Returns a number, at least 0, in as few bytes as it takes."""
    if number < 128:
        return b"%c" % number
    if number < 16_384:
        return b"%c%c" % (number & 127 | 128, number >> 7)
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)
