"""Server reflection under both versions: every kind of symbol leads to its file."""

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from service.server import ServerOptions
from service.servicers.reflection import SymbolIndex

INFERENCE = "numaserve/v1/inference.proto"
HEALTH = health_pb2.DESCRIPTOR.name
V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


@pytest.fixture(params=[V1, V1ALPHA])
async def ask(request, server):
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        method = channel.stream_stream(
            f"/{request.param}/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )

        async def ask(**question) -> ServerReflectionResponse:
            call = method(iter([ServerReflectionRequest(**question)]))
            return await call.read()

        yield ask


def file_names(answer: ServerReflectionResponse) -> list[str]:
    protos = answer.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(proto).name for proto in protos]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("numaserve.v1.Inference", INFERENCE),
        ("numaserve.v1.Inference.Infer", INFERENCE),
        ("numaserve.v1.Inference.InferStream", INFERENCE),
        ("numaserve.v1.InferRequest", INFERENCE),
        ("numaserve.v1.InferRequest.prompt", INFERENCE),
        ("numaserve.v1.InferRequest.LogitBiasEntry", INFERENCE),
        ("numaserve.v1.InferRequest.LogitBiasEntry.key", INFERENCE),
        ("numaserve.v1.StructuredOutput.kind", INFERENCE),
        ("numaserve.v1.FinishReason", INFERENCE),
        ("numaserve.v1.FINISH_REASON_STOP", INFERENCE),
        ("grpc.health.v1.Health.Watch", HEALTH),
        ("grpc.health.v1.HealthCheckResponse.ServingStatus", HEALTH),
        ("grpc.health.v1.HealthCheckResponse.NOT_SERVING", HEALTH),
        (f"{V1}.ServerReflectionInfo", "grpc/reflection/v1/reflection.proto"),
        (V1ALPHA, reflection_pb2.DESCRIPTOR.name),
        ("google.rpc.RetryInfo", "google/rpc/error_details.proto"),
    ],
)
async def test_a_symbol_leads_to_its_file(ask, symbol, file):
    answer = await ask(file_containing_symbol=symbol)
    assert file_names(answer)[0] == file
    assert answer.original_request.file_containing_symbol == symbol


async def test_a_file_comes_by_name(ask):
    assert file_names(await ask(file_by_filename=INFERENCE)) == [INFERENCE]


async def test_services_are_listed(ask):
    answer = await ask(list_services="")
    assert [service.name for service in answer.list_services_response.service] == [
        "grpc.health.v1.Health",
        V1,
        V1ALPHA,
        "numaserve.v1.Inference",
    ]


async def test_a_message_without_extensions_has_no_numbers(ask):
    answer = await ask(all_extension_numbers_of_type="numaserve.v1.InferRequest")
    assert answer.all_extension_numbers_response.base_type_name == "numaserve.v1.InferRequest"
    assert list(answer.all_extension_numbers_response.extension_number) == []


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ({"file_containing_symbol": "numaserve.v1.Inference.Nothing"}, grpc.StatusCode.NOT_FOUND),
        ({"file_containing_symbol": "numaserve.v1"}, grpc.StatusCode.NOT_FOUND),
        ({"file_containing_symbol": ""}, grpc.StatusCode.NOT_FOUND),
        ({"file_by_filename": "other.proto"}, grpc.StatusCode.NOT_FOUND),
        ({"all_extension_numbers_of_type": "numaserve.v1.Nothing"}, grpc.StatusCode.NOT_FOUND),
        (
            {
                "file_containing_extension": reflection_pb2.ExtensionRequest(
                    containing_type="numaserve.v1.InferRequest", extension_number=9
                )
            },
            grpc.StatusCode.NOT_FOUND,
        ),
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_is_not_there_is_an_error_in_the_answer(ask, question, code):
    assert (await ask(**question)).error_response.error_code == code.value[0]


def test_extensions_and_imports_are_found():
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", package="base", syntax="proto2")
    base.message_type.add(name="Open").extension_range.add(start=100, end=200)
    more = descriptor_pb2.FileDescriptorProto(name="more.proto", syntax="proto2", dependency=["base.proto"])
    more.extension.add(name="extra", number=101, type=5, label=1, extendee=".base.Open")
    more.enum_type.add(name="Colour").value.add(name="RED", number=0)
    pool = descriptor_pool.DescriptorPool()
    for file in (base, more):
        pool.AddSerializedFile(file.SerializeToString())
    index = SymbolIndex([pool.FindFileByName("more.proto")])
    assert index.extensions["base.Open", 101].name == "more.proto"
    assert {name: file.name for name, file in index.symbols.items()} == {
        "extra": "more.proto",
        "Colour": "more.proto",
        "RED": "more.proto",
        "base.Open": "base.proto",
    }


class TestWithout:
    @pytest.fixture
    def options(self):
        return ServerOptions(reflection=False)

    async def test_reflection_can_be_off(self, ask):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(list_services="")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
