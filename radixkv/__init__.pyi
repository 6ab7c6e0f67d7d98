from radixkv.service.client import AsyncClient as AsyncClient
from radixkv.service.client import Client as Client

__version__: str
