"""Server reflection, v1 and v1alpha, for clients that are told nothing but an address (ghz, grpcurl)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

ALPHA_SERVICE_NAME: str = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
SERVICE_NAME = "grpc.reflection.v1.ServerReflection"


class SymbolIndex:
    """Files, symbols and extensions that `files` and all that they import hold.

    Protobuf's own pool finds messages and services by name but, depending on its version, not methods,
    fields, oneofs or enum values; clients ask for methods, so every symbol is listed here.
    """

    def __init__(self, files: Iterable[FileDescriptor]) -> None:
        self.files: dict[str, FileDescriptor] = {}
        self.symbols: dict[str, FileDescriptor] = {}
        self.messages: set[str] = set()
        self.extensions: dict[tuple[str, int], FileDescriptor] = {}
        for file in files:
            self._add_file(file)

    def _add_file(self, file: FileDescriptor) -> None:
        if file.name in self.files:
            return
        self.files[file.name] = file
        for message in file.message_types_by_name.values():
            self._add_message(message, file)
        for enum in file.enum_types_by_name.values():
            self._add_enum(enum, file)
        for extension in file.extensions_by_name.values():
            self._add_extension(extension, file)
        for service in file.services_by_name.values():
            self.symbols[service.full_name] = file
            for method in service.methods:
                self.symbols[f"{service.full_name}.{method.name}"] = file
        for dependency in file.dependencies:
            self._add_file(dependency)

    def _add_message(self, message: Descriptor, file: FileDescriptor) -> None:
        self.symbols[message.full_name] = file
        self.messages.add(message.full_name)
        for field in message.fields:
            self.symbols[field.full_name] = file
        for oneof in message.oneofs:
            self.symbols[oneof.full_name] = file
        for enum in message.enum_types:
            self._add_enum(enum, file)
        for extension in message.extensions:
            self._add_extension(extension, file)
        for nested in message.nested_types:
            self._add_message(nested, file)

    def _add_enum(self, enum: EnumDescriptor, file: FileDescriptor) -> None:
        self.symbols[enum.full_name] = file
        # The values of an enum are its siblings in scope, not its children.
        scope = enum.full_name.rpartition(".")[0]
        for value in enum.values:
            self.symbols[f"{scope}.{value.name}" if scope else value.name] = file

    def _add_extension(self, extension: FieldDescriptor, file: FileDescriptor) -> None:
        self.symbols[extension.full_name] = file
        if extension.containing_type is not None:
            self.extensions[extension.containing_type.full_name, extension.number] = file


class ReflectionServicer:
    """Answers reflection requests about `service_names`, whose descriptors are in `pool`.

    The messages of v1 and v1alpha are the same on the wire, so one servicer serves both names.
    """

    def __init__(
        self, service_names: Iterable[str], pool: descriptor_pool.DescriptorPool | None = None
    ) -> None:
        self._service_names = sorted({*service_names, SERVICE_NAME, ALPHA_SERVICE_NAME})
        pool = pool or descriptor_pool.Default()
        found = [pool.FindServiceByName(name).file for name in self._service_names if name != SERVICE_NAME]
        # Clients look up the details of errors as well.
        self._index = SymbolIndex([*found, _v1_file(), error_details_pb2.DESCRIPTOR])

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register both versions on `server`."""
        handler = grpc.stream_stream_rpc_method_handler(
            self.ServerReflectionInfo,
            request_deserializer=ServerReflectionRequest.FromString,
            response_serializer=ServerReflectionResponse.SerializeToString,
        )
        for name in (SERVICE_NAME, ALPHA_SERVICE_NAME):
            methods = {"ServerReflectionInfo": handler}
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, methods)])

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[ServerReflectionRequest], _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ServerReflectionResponse]:
        async for request in requests:
            yield self._answer(request)

    def _answer(self, request: ServerReflectionRequest) -> ServerReflectionResponse:
        kind = request.WhichOneof("message_request")
        index = self._index
        match kind:
            case "list_services":
                services = [reflection_pb2.ServiceResponse(name=name) for name in self._service_names]
                return ServerReflectionResponse(
                    original_request=request,
                    list_services_response=reflection_pb2.ListServiceResponse(service=services),
                )
            case "file_by_filename":
                return _file_answer(request, index.files.get(request.file_by_filename))
            case "file_containing_symbol":
                return _file_answer(request, index.symbols.get(request.file_containing_symbol))
            case "file_containing_extension":
                asked = request.file_containing_extension
                return _file_answer(
                    request, index.extensions.get((asked.containing_type, asked.extension_number))
                )
            case "all_extension_numbers_of_type":
                return self._extension_numbers(request)
            case _:
                return _error(request, grpc.StatusCode.INVALID_ARGUMENT, "the request asks for nothing")

    def _extension_numbers(self, request: ServerReflectionRequest) -> ServerReflectionResponse:
        name = request.all_extension_numbers_of_type
        if name not in self._index.messages:
            return _error(request, grpc.StatusCode.NOT_FOUND, f"no message {name!r} here")
        numbers = sorted(number for extended, number in self._index.extensions if extended == name)
        return ServerReflectionResponse(
            original_request=request,
            all_extension_numbers_response=reflection_pb2.ExtensionNumberResponse(
                base_type_name=name, extension_number=numbers
            ),
        )


def _file_answer(request: ServerReflectionRequest, file: FileDescriptor | None) -> ServerReflectionResponse:
    """The file and all that it imports, so that clients need not ask again."""
    if file is None:
        return _error(request, grpc.StatusCode.NOT_FOUND, "no such file, symbol or extension here")
    files = {file.name: file}
    waiting = [file]
    while waiting:
        for dependency in waiting.pop().dependencies:
            if dependency.name not in files:
                files[dependency.name] = dependency
                waiting.append(dependency)
    return ServerReflectionResponse(
        original_request=request,
        file_descriptor_response=reflection_pb2.FileDescriptorResponse(
            file_descriptor_proto=[found.serialized_pb for found in files.values()]
        ),
    )


def _error(request: ServerReflectionRequest, code: grpc.StatusCode, message: str) -> ServerReflectionResponse:
    return ServerReflectionResponse(
        original_request=request,
        error_response=reflection_pb2.ErrorResponse(error_code=code.value[0], error_message=message),
    )


def _v1_file() -> FileDescriptor:
    """The v1 description, made from v1alpha's, in a pool of its own so that it meets no other copy."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = SERVICE_NAME.rpartition(".")[0]
    alpha, renamed = f".{reflection_pb2.DESCRIPTOR.package}.", f".{file.package}."
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(alpha, renamed)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(alpha, renamed)
        method.output_type = method.output_type.replace(alpha, renamed)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)
