"""The texts of JSON documents as they stand in their source, number for number.

Spark's own JSON functions read a number with a fraction into a double before they give a text back. Jackson, which they
are made with, tells where a document begins and ends: a class of Java (`compiled`) asks it, and is a function of SQL.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import ArrayType, StringType

from kproxy.pipeline.ingest.compiled import add_class
from kproxy.pipeline.spark import as_spark_failure

_FUNCTION: Final = "kproxy_documents"
_PACKAGE: Final = "kproxy"
_CLASS: Final = "Documents"
_SOURCE: Final = f"""
package {_PACKAGE};

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.core.JsonToken;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.api.java.UDF1;

public class {_CLASS} implements UDF1 {{
    private static final JsonFactory FACTORY = new JsonFactory();

    public Object call(Object given) throws Exception {{
        if (given == null) {{
            return null;
        }}
        String text = (String) given;
        JsonParser parser = FACTORY.createParser(text);
        try {{
            parser.configure(JsonParser.Feature.STRICT_DUPLICATE_DETECTION, true);
            return documents(parser, text);
        }} catch (JsonProcessingException noJson) {{
            return null;
        }} finally {{
            parser.close();
        }}
    }}

    private static List documents(JsonParser parser, String text) throws Exception {{
        List found = new ArrayList();
        JsonToken token = parser.nextToken();
        boolean several = token == JsonToken.START_ARRAY;
        if (several) {{
            token = parser.nextToken();
        }}
        while (token == JsonToken.START_OBJECT && (several || found.isEmpty())) {{
            int begin = (int) parser.currentTokenLocation().getCharOffset();
            parser.skipChildren();
            int end = (int) parser.currentLocation().getCharOffset();
            found.add(text.substring(begin, end));
            token = parser.nextToken();
        }}
        if (several && token == JsonToken.END_ARRAY) {{
            token = parser.nextToken();
            several = false;
        }}
        return token == null && !several ? found : null;
    }}
}}
"""


def add_function(session: SparkSession) -> None:
    """What `documents_in` needs in `session` and in what is cloned from it. Raises SparkFailed."""
    with as_spark_failure("The function that finds JSON documents was not taken"):
        spark: Any = session._jsparkSession
        found = add_class(session, f"{_PACKAGE}.{_CLASS}", _SOURCE).newInstance()
        spark.udf().register(_FUNCTION, found, spark.parseDataType(ArrayType(StringType()).json()))


def documents_in(text: Column) -> Column:
    """The text of the document, or of each in an array of them; null for what RFC 8259 does not have, for an element
    that is no object, for text behind, and where a field is there twice, however deep."""
    return F.call_function(_FUNCTION, text)
