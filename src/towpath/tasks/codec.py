"""Arguments and results as JSON, by the types of a function's signature.

The arguments of a call are one JSON object by parameter name; `*args` is a list and `**kwargs` an object
under its own name. Omitted arguments are not stored, so that the function's default applies when it runs. At
enqueue the encoded arguments are decoded once with the same types, so that unreadable arguments are never
stored. Types: all that `msgspec` supports, and any class with `model_dump` and `model_validate_json`, such as
pydantic's models. A parameter without annotation takes any JSON."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, Union, get_args, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from towpath.core import checks
from towpath.errors import InvalidInput

AFTER = "towpath-after"
"""The name under which a job stores its dependencies: a header, or a member beside the arguments, where no
parameter can have this name."""

Bound = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments, ready for the call."""

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BYTES = (bytes, bytearray)
_PATH = re.compile(r" - at `\$\.?([^.`\[]*)([^`]*)`$")


def _to_plain(value: Any) -> Any:
    """Encode types that msgspec does not support. Pydantic's models are recognised by their methods, without
    importing it."""
    if hasattr(value, "model_dump") and not isinstance(value, type):
        # Under the names of the fields and without what is computed: so that `_from_plain` can read it,
        # whatever the aliases.
        return value.model_dump(mode="json", by_alias=False, round_trip=True)
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON")


def _from_plain(kind: type, value: Any) -> Any:
    if hasattr(kind, "model_validate_json"):
        try:
            # As JSON again, because strict models take a date or a UUID as text from nowhere else.
            return kind.model_validate_json(_encoder.encode(value), by_name=True)
        except ValueError as error:
            raise ValueError(_in_one_line(error)) from None
    raise TypeError(f"a {kind.__name__} cannot be read from JSON")


def _in_one_line(error: ValueError) -> str:
    """One line per invalid field. Pydantic's own text has four lines for each."""
    if not hasattr(error, "errors"):
        return str(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(
        ": ".join([*filter(None, [".".join(map(str, each["loc"]))]), each["msg"]]) for each in found
    )


_encoder = msgspec.json.Encoder(enc_hook=_to_plain)
_canonical = msgspec.json.Encoder(enc_hook=_to_plain, order="deterministic")
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def encode(value: Any, field: str = "value") -> bytes:
    """Any JSON value. Raises InvalidInput if it is not one; `field` is its name in the error."""
    try:
        content = _encoder.encode(value)
    except Exception as error:
        raise InvalidInput(
            field=field, value=value, expected=f"something that can be stored as JSON: {error}"
        ) from error
    checks.finite(field, value, content, _to_plain)
    return content


def decode(data: bytes) -> Any:
    """Decode the output of `encode` to plain values."""
    return _any_decoder.decode(data)


class Codec:
    """The types of one function. Made once per task; safe from any thread."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name = name
        self.parameters = dict(inspect.signature(function).parameters)
        hints = _hints(function, name)
        kinds = {each.kind for each in self.parameters.values()}
        self._rest = _only(self.parameters, Parameter.VAR_POSITIONAL)
        self._more = _only(self.parameters, Parameter.VAR_KEYWORD)
        self._plain = kinds <= {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
        self._by_position = [each.name for each in self.parameters.values() if each.kind in _BY_POSITION]
        self._bytes = {each for each, hint in hints.items() if set(get_args(hint) or (hint,)) & set(_BYTES)}
        self._required = {each.name for each in self.parameters.values() if _is_required(each)}
        self._names = frozenset(self.parameters)
        self._all_required = len(self._required) == len(self._names)
        self._decode: Callable[[bytes], msgspec.Struct] = msgspec.json.Decoder(
            self._struct(hints), dec_hook=_from_plain
        ).decode
        self._result = self._decoder_of(hints.get("return", Any), "return")

    def _struct(self, hints: Mapping[str, Any]) -> type[msgspec.Struct]:
        fields: list[Any] = [("towpath__after", Any, UNSET)]
        for each in self.parameters.values():
            hint = hints.get(each.name, Any)
            if each.kind is Parameter.VAR_POSITIONAL:
                hint = list[hint]  # type: ignore[valid-type]
            elif each.kind is Parameter.VAR_KEYWORD:
                hint = dict[str, hint]  # type: ignore[valid-type]
            self._decoder_of(hint, each.name)
            optional = Union[hint, UnsetType]  # type: ignore[valid-type]  # noqa: UP007
            fields.append((each.name, hint) if _is_required(each) else (each.name, optional, UNSET))
        names = {"towpath__after": AFTER}
        return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True, rename=names)

    def _decoder_of(self, hint: Any, parameter: str) -> msgspec.json.Decoder[Any]:
        try:
            return msgspec.json.Decoder(hint, dec_hook=_from_plain)
        except (TypeError, RecursionError) as error:
            raise InvalidInput(
                field=f"{self.name}({parameter})", value=hint, expected=f"a type with a JSON form: {error}"
            ) from error

    # At enqueue

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by parameter name, as given: no defaults."""
        if self._plain and len(args) <= len(self._by_position):
            arguments = dict(zip(self._by_position, args))  # noqa: B905  # which costs more than all the rest
            if not kwargs and len(args) == len(self._names):
                return arguments
            for name, value in kwargs.items():
                if name in arguments or name not in self._names:
                    break
                arguments[name] = value
            else:
                if len(arguments) == len(self._names) or self._required <= arguments.keys():
                    return arguments
        return self._bind_by_signature(args, kwargs)

    def _bind_by_signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return dict(inspect.Signature(list(self.parameters.values())).bind(*args, **kwargs).arguments)
        except TypeError as error:
            shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
            raise InvalidInput(
                field=f"{self.name}()", value=shown, expected=f"its own parameters: {error}"
            ) from None

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        """The payload of a call. Raises InvalidInput naming task, parameter and value."""
        for name in self._bytes:
            if isinstance(arguments.get(name), str):
                raise self._wrong(name, arguments[name], "Expected `bytes`, got `str`")
        try:
            payload = _encoder.encode(arguments)
        except Exception as error:
            raise self._not_json(arguments, error) from error
        if payload.find(b"null") >= 0:  # `in` costs four times as much
            self._check_finite(arguments, payload)
        try:
            self._decode(payload)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            text, name = _where(error)
            raise self._wrong(name, arguments.get(name), text) from None
        return payload

    def _check_finite(self, arguments: Mapping[str, Any], payload: bytes) -> None:
        try:
            checks.finite("", arguments, payload, _to_plain)
        except InvalidInput as error:
            raise self._wrong(
                error.details["field"], error.details["value"], error.details["expected"]
            ) from None

    def canonical(self, arguments: Mapping[str, Any]) -> bytes:
        """The same bytes for equal arguments, whatever the order of dicts and sets."""
        return _canonical.encode(arguments)

    def full(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with the defaults of what was left out."""
        defaults = {
            each.name: each.default
            for each in self.parameters.values()
            if each.default is not Parameter.empty
        }
        return {**defaults, **arguments}

    # At run

    def decode(self, payload: bytes) -> Bound:
        """The arguments of a stored call. Raises InvalidInput if they do not fit the signature (any more)."""
        values = self._values(payload)
        return ((), values) if self._plain else self.spread(values)

    def spread(self, arguments: Mapping[str, Any]) -> Bound:
        """Arguments by name as the positional and keyword arguments of a call."""
        values = dict(arguments)
        if self._plain:
            return (), values
        positional: list[Any] = []
        for name in self._by_position:
            if name not in values:
                break
            positional.append(values.pop(name))
        if self._rest is not None:
            positional += values.pop(self._rest, ())
        more = values.pop(self._more, {}) if self._more is not None else {}
        return tuple(positional), {**values, **more}

    def named(self, payload: bytes) -> dict[str, Any]:
        """The arguments of a stored call by parameter name."""
        return self._values(payload)

    def _values(self, payload: bytes) -> dict[str, Any]:
        try:
            found = self._decode(payload)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            text, name = _where(error)
            raise self._wrong(name, payload, text) from error
        values = asdict(found)
        del values["towpath__after"]
        return (
            values
            if self._all_required
            else {name: value for name, value in values.items() if value is not UNSET}
        )

    # Results

    def encode_result(self, value: Any) -> bytes | None:
        """None is stored as nothing. Raises InvalidInput."""
        if value is None:
            return None
        try:
            content = _encoder.encode(value)
        except Exception as error:
            expected = f"a result that can be stored as JSON: {error}"
            raise InvalidInput(field=f"what {self.name} returned", value=value, expected=expected) from error
        checks.finite(f"{self.name}()", value, content, _to_plain)
        return content

    def decode_result(self, data: bytes | None) -> Any:
        """Decode a result. Raises InvalidInput if it does not fit the annotation."""
        try:
            return self._result.decode(b"null" if data is None else data)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            expected = f"a value that fits its return annotation: {error}"
            raise InvalidInput(field=f"the result of {self.name}", value=data, expected=expected) from error

    # What to say

    def _not_json(self, arguments: Mapping[str, Any], error: Exception) -> InvalidInput:
        for name, value in arguments.items():
            try:
                _encoder.encode(value)
            except Exception as its_own:
                return self._wrong(name, value, f"it cannot be stored as JSON: {its_own}")
        return self._wrong("", dict(arguments), f"it cannot be stored as JSON: {error}")

    def _wrong(self, name: str, value: Any, text: str) -> InvalidInput:
        return InvalidInput(field=f"{self.name}({name})", value=value, expected=text)


def _where(error: Exception) -> tuple[str, str]:
    """The text of msgspec's error, and the parameter that it concerns."""
    text = str(error)
    at = _PATH.search(text)
    if at is None:
        return text, ""
    deeper = f" at {at[1]}{at[2]}" if at[2] else ""
    return text[: at.start()] + deeper, at[1]


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except NameError as error:
        expected = (
            f"annotations that can be looked up when the program runs ({error}); "
            "define or import the type in its module"
        )
        raise InvalidInput(field=f"task {name}", value=function, expected=expected) from error


def _is_required(parameter: Parameter) -> bool:
    many = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not many


def _only(parameters: Mapping[str, Parameter], kind: Any) -> str | None:
    return next((each.name for each in parameters.values() if each.kind is kind), None)
