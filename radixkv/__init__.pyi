from radixkv.service.client import AsyncClient as AsyncClient
from radixkv.service.client import Client as Client
from radixkv.service.offline import LLM as LLM
from radixkv.service.offline import CompletionOutput as CompletionOutput
from radixkv.service.offline import RequestOutput as RequestOutput
from radixkv.service.offline import SamplingParams as SamplingParams
from radixkv.service.offline import StructuredOutputsParams as StructuredOutputsParams
from radixkv.service.offline import TextPrompt as TextPrompt
from radixkv.service.offline import TokensPrompt as TokensPrompt

__version__: str
