"""Arguments and results as JSON, by the types of a function's signature.

The arguments of a call are one JSON object by parameter name; `*args` is a list and `**kwargs` an object
under its own name. Omitted arguments are not stored, so that the function's default applies when it runs. At
enqueue the encoded arguments are decoded once with the same types, so that unreadable arguments are never
stored. Types: all that `msgspec` supports, and any class with `model_dump` and `model_validate_json`, such as
pydantic's models. A parameter without annotation takes any JSON."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, Protocol, Union, get_args

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from towpath.core import checks
from towpath.core.checks import optional_seconds, optional_utc, utc
from towpath.core.job import DONE, After, Job
from towpath.core.views import GroupStatus, GroupView, JobStatus
from towpath.errors import Described, InvalidInput, shortened
from towpath.tasks.hooks import hints_of, provided

AFTER = "towpath-after"
"""The name under which a job stores its dependencies: a header, or a member beside the arguments, where no
parameter can have this name."""

Bound = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments, ready for the call."""

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BYTES = (bytes, bytearray)
UNREADABLE = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)
"""Exceptions of a decoder."""
MAYBE_DEEP = 900
"""A result with more lists and objects than this is decoded once before it is stored: Python 3.14 encodes
values that are nested deeper than it can decode."""
_TYPES = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")
_PATH = re.compile(r" - at `\$\.?([^.`\[]*)([^`]*)`$")


def to_plain(value: Any) -> Any:
    """Encode types that msgspec does not support. Pydantic's models are recognised by their methods, without
    importing it."""
    if hasattr(value, "model_dump") and not isinstance(value, type):
        # Under the names of the fields and without what is computed: so that `_from_plain` can read it,
        # whatever the aliases.
        return value.model_dump(mode="json", by_alias=False, round_trip=True)
    raise TypeError(f"a {type(value).__name__} has no JSON form; use its id or plain values instead")


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


_encoder = msgspec.json.Encoder(enc_hook=to_plain)
_canonical = msgspec.json.Encoder(enc_hook=to_plain, order="deterministic")
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def encode(value: Any, field: str = "value") -> bytes:
    """Any JSON value. Raises InvalidInput if it is not one; `field` is its name in the error."""
    try:
        content = _encoder.encode(value)
    except Exception as error:
        raise InvalidInput(
            field=field, value=value, expected=f"something that can be stored as JSON: {error}"
        ) from error
    checks.finite(field, value, content, to_plain)
    return content


def decode(data: bytes) -> Any:
    """Decode the output of `encode` to plain values."""
    return _any_decoder.decode(data)


def decode_plain(data: bytes | None) -> Any:
    """Decode a result of unknown type."""
    return None if data is None else decode(data)


class ResultCodec:
    """The results of one function, by their annotated type. Safe from any thread."""

    def __init__(self, name: str, hint: Any, what: str) -> None:
        self.name = name
        self._what = what
        self._result = self._decoder_of(hint, "return")

    def _decoder_of(self, hint: Any, parameter: str) -> msgspec.json.Decoder[Any]:
        try:
            return _any_decoder if hint is Any else msgspec.json.Decoder(hint, dec_hook=_from_plain)
        except (TypeError, RecursionError) as error:
            where = "the result" if parameter == "return" else f"parameter {parameter}"
            message = f"{where} of {self._what} has the type {shortened(hint)}, without a JSON form: {error}"
            raise InvalidInput(
                field=f"{self.name}({parameter})",
                value=hint,
                expected="a type with a JSON form",
                message=message,
            ) from error

    def encode_result(self, value: Any) -> bytes | None:
        """None is stored as nothing. Raises InvalidInput."""
        if value is None:
            return None
        try:
            content = _encoder.encode(value)
            if content.count(b"[") + content.count(b"{") > MAYBE_DEEP:
                decode(content)
        except Exception as error:
            expected = f"a result that can be stored as JSON: {_where(error)[0]}"
            raise InvalidInput(field=f"what {self.name} returned", value=value, expected=expected) from error
        checks.finite(f"{self.name}()", value, content, to_plain)
        return content

    def decode_result(self, data: bytes | None) -> Any:
        """Decode a result. Raises InvalidInput if it does not fit the annotation."""
        try:
            return self._result.decode(b"null" if data is None else data)
        except UNREADABLE as error:
            expected = f"a value that fits its return annotation: {_where(error)[0]}"
            raise InvalidInput(field=f"the result of {self.name}", value=data, expected=expected) from error


def result_codec(function: Callable[..., Any], name: str, what: str) -> ResultCodec:
    """The codec of the results of a function. Only its return annotation is looked up."""
    found = inspect.unwrap(function)
    annotations = getattr(found, "__annotations__", {})
    only: Any = SimpleNamespace(__annotations__={"return": annotations.get("return", Any)})
    only.__globals__ = getattr(found, "__globals__", {})
    return ResultCodec(name, hints_of(only, what)["return"], what)


class Codec(ResultCodec):
    """The types of one function. Made once per task; safe from any thread."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        declared = inspect.signature(function).parameters
        self.parameters = {each: found for each, found in declared.items() if found.default is not provided}
        self._provided = declared.keys() - self.parameters.keys()
        hints = hints_of(function, f"task {name}")
        super().__init__(name, hints.get("return", Any), f"task {name}")
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
        for name in sorted(self._provided & kwargs.keys()):
            message = f"{self.name}({name}) is provided by the worker: leave it out"
            raise InvalidInput(
                field=f"{self.name}({name})", value=kwargs[name], expected="left out", message=message
            )
        try:
            return dict(inspect.Signature(list(self.parameters.values())).bind(*args, **kwargs).arguments)
        except TypeError as error:
            given = [shortened(each, 40) for each in args]
            given += [f"{name}={shortened(value, 40)}" for name, value in kwargs.items()]
            shown = ", ".join(given)
            raise self._no_call(f"({shown})", str(error)) from None

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        """The payload of a call. Raises InvalidInput naming task, parameter and value."""
        for name in self._bytes:
            if isinstance(arguments.get(name), str):
                raise self._wrong(name, arguments[name], "bytes, not str")
        try:
            payload = _encoder.encode(arguments)
        except Exception as error:
            raise self._not_json(arguments, error) from error
        if payload.find(b"null") >= 0:  # `in` costs four times as much
            self._check_finite(arguments, payload)
        try:
            self._decode(payload)
        except UNREADABLE as error:
            raise self._unfit(error, arguments) from None
        return payload

    def _check_finite(self, arguments: Mapping[str, Any], payload: bytes) -> None:
        try:
            checks.finite("", arguments, payload, to_plain)
        except InvalidInput as error:
            raise self._wrong(error.field, error.value, error.expected) from None

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
        except UNREADABLE as error:
            raise self._unfit(error, payload) from error
        values = asdict(found)
        del values["towpath__after"]
        return (
            values
            if self._all_required
            else {name: value for name, value in values.items() if value is not UNSET}
        )

    # Texts of errors

    def _not_json(self, arguments: Mapping[str, Any], error: Exception) -> InvalidInput:
        for name, value in arguments.items():
            try:
                _encoder.encode(value)
            except Exception as its_own:
                return self._wrong(name, value, f"something that can be stored as JSON: {its_own}")
        return self._wrong("", dict(arguments), f"something that can be stored as JSON: {error}")

    def _wrong(self, name: str, value: Any, expected: str) -> InvalidInput:
        field, shown = f"{self.name}({name})", value if isinstance(value, Described) else shortened(value)
        message = f"{self._argument(name)} is {shown}; it must be {expected}"
        return InvalidInput(field=field, value=value, expected=expected, message=message)

    def _no_call(self, shown: str, why: str) -> InvalidInput:
        """The error of arguments that the signature does not have, or lacks."""
        wanted = ", ".join(str(each.replace(annotation=Parameter.empty)) for each in self.parameters.values())
        message = f"{self.name}({wanted}) cannot be called with {shown}: {why}"
        return InvalidInput(
            field=f"{self.name}()", value=Described(shown), expected=f"({wanted})", message=message
        )

    def _argument(self, name: str) -> str:
        """An argument, or all of them, as the subject of an error."""
        return f"{self.name}: argument {name}" if name else f"{self.name}: the JSON of the arguments"

    def _unfit(self, error: Exception, given: Mapping[str, Any] | bytes) -> InvalidInput:
        """The error of arguments, or of a stored payload, that msgspec refuses."""
        text, name = _where(error)
        if isinstance(given, bytes):
            shown = given[:77].decode("ascii", "backslashreplace") + "..." * (len(given) > 77)
            if (found := _FIELD.fullmatch(text)) and not name:
                why = "unexpected" if found[1].startswith("contains") else "missing"
                return self._no_call(shown, f"argument {found[2]!r} is {why}")
            plain = _any(given)
            value = plain.get(name) if name and isinstance(plain, Mapping) else Described(shown or "empty")
        else:
            value = given.get(name)
        if types := _TYPES.fullmatch(text):
            return self._wrong(name, value, f"{_in_python(types[1])}, not {_in_python(types[2])}")
        field = f"{self.name}({name})"
        reason = text if text.startswith("JSON") else text[:1].lower() + text[1:]
        shown = value if isinstance(value, Described) else shortened(value)
        message = f"{self._argument(name)} is {shown}: {reason}"
        return InvalidInput(field=field, value=value, expected=reason, message=message)


def _in_python(types: str) -> str:
    """A type as msgspec writes it, in the words of Python: `int | null` is `int or None`."""
    return types.replace("null", "None").replace(" | ", " or ")


def _where(error: Exception) -> tuple[str, str]:
    """The text of msgspec's error, and the parameter that it concerns."""
    text = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
    at = _PATH.search(text)
    if at is None:
        return text, ""
    deeper = f" at {at[1]}{at[2]}" if at[2] else ""
    return text[: at.start()] + deeper, at[1]


def _is_required(parameter: Parameter) -> bool:
    many = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not many


def _only(parameters: Mapping[str, Parameter], kind: Any) -> str | None:
    return next((each.name for each in parameters.values() if each.kind is kind), None)


# Dependencies

MAX_NAMED = 32 * 1024
"""The longest header with the dependencies of a job, in characters. Longer lists are stored with the
payload."""


class _Group(msgspec.Struct, frozen=True):
    group: str


class _Waiting(msgspec.Struct, frozen=True):
    """The dependencies that a payload stores."""

    after: list[str | _Group] = msgspec.field(name=AFTER, default_factory=list)


def with_after(payload: bytes, fields: Mapping[str, Any]) -> tuple[bytes, Mapping[str, Any]]:
    """The payload and fields with the dependencies in them: `results()` returns in this order."""
    after: Sequence[After] = fields["after"]
    header = ",".join(f"@{each.id}" if each.group else each.id for each in after)
    if len(header) <= MAX_NAMED and not any("," in each.id or each.id.startswith("@") for each in after):
        return payload, {
            **fields,
            "headers": {**fields.get("headers", {}), AFTER: header},
        } if after else fields
    waiting = msgspec.json.encode(_Waiting([_Group(each.id) if each.group else each.id for each in after]))
    return (payload[:-1] + b"," + waiting[1:] if len(payload) > 2 else waiting), fields


def waited_for(job: Job) -> list[After]:
    """The jobs and groups that a job waited for, in order."""
    if AFTER in job.headers:
        names = [name for name in job.headers[AFTER].split(",") if name]
        return [After(name.removeprefix("@"), group=name.startswith("@")) for name in names]
    if AFTER.encode() not in job.payload:
        return []
    try:
        named = msgspec.json.decode(job.payload, type=_Waiting).after
    except UNREADABLE:  # a message or a text that contains the name
        return []
    return [After(each.group, group=True) if isinstance(each, _Group) else After(each) for each in named]


# Status


class Values(Protocol):
    """Decodes the results and arguments of jobs."""

    def decode_result(self, data: bytes | None) -> Any: ...

    def codec_of(self, kind: str) -> Codec | None:
        """The codec of the task of this name; None if the task is not known in this process."""
        ...


_TIMES = ("started_at", "finished_at", "expires_at")
_SPANS = ("timeout", "retention")
_AS_STORED = (
    *("id", "kind", "queue", "state", "reason", "error", "attempts", "attempts_used", "max_attempts"),
    *("failures", "losses", "priority", "part", "key", "owner", "cancel_requested"),
    *("progress_done", "progress_total", "group", "parent", "generation", "correlation_id", "headers"),
)


def job_status(job: Job, values: Values | None) -> JobStatus:
    """The view of a record. Without `values`, its arguments and result are plain JSON."""
    codec = values.codec_of(job.kind) if values is not None and job.kind else None
    after = waited_for(job)
    fields: dict[str, Any] = {name: getattr(job, name) for name in _AS_STORED}
    fields |= {name: optional_utc(getattr(job, name)) for name in _TIMES}
    fields |= {name: optional_seconds(getattr(job, name)) for name in _SPANS}
    return JobStatus(
        **fields,
        created_at=utc(job.created_at),
        ready_at=utc(job.ready_at),
        arguments=_arguments(job, codec) if job.kind else None,
        result=_result(job.result, codec) if job.state is DONE else None,
        cursor=_any(job.cursor),
        after=tuple(each.id for each in after if not each.group),
        after_groups=tuple(each.id for each in after if each.group),
    )


def group_status(view: GroupView) -> GroupStatus:
    fields = {name: getattr(view, name) for name in GroupView.__struct_fields__}
    return GroupStatus(
        **{**fields, "created_at": utc(view.created_at), "closed_at": optional_utc(view.closed_at)}
    )


def _arguments(job: Job, codec: Codec | None) -> Mapping[str, Any] | None:
    """The arguments by name. If they do not fit the signature any more, as plain JSON."""
    if codec is not None:
        try:
            return codec.named(job.payload)
        except InvalidInput:
            pass
    plain = _any(job.payload)
    if not isinstance(plain, dict):
        return None
    return {name: value for name, value in plain.items() if name != AFTER}


def _result(data: bytes | None, codec: Codec | None) -> Any:
    if codec is not None:
        try:
            return codec.decode_result(data)
        except InvalidInput:
            pass
    return _any(data)


def _any(data: bytes | None) -> Any:
    """A stored value: JSON decoded, other bytes as they are."""
    if not data:
        return None
    try:
        return decode(data)
    except UNREADABLE:
        return data
