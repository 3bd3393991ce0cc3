{#-
    Change Data Capture in SQL: typed changes from the records that `python_jobs/ingestion/change_data_capture.py`
    writes to bronze. There are two models: a view over `change_data_capture_flags`, and an incremental table (append)
    over `change_data_capture_changes`. From that table the Merger builds the current state, and `materialized='scd2'`
    the history.

    `lsn`, the change's position in PostgreSQL's log, orders the changes of a row, because a transaction holds the row's
    lock until its commit. The topic's offset does not, because a restarted connector sends its last changes again.
    Other databases have no such number, and their records are rejected.
-#}

{% macro change_data_capture_flags(relation, columns, key) %}
    {{ return(adapter.dispatch('change_data_capture_flags', 'lakehouse_patterns')(relation, columns, key)) }}
{% endmacro %}

{% macro default__change_data_capture_flags(relation, columns, key) %}
    {#- Helper values are fields of structs (`cdc`, `texts`, `typed`), so that their names can't meet the names of the
        source's columns. -#}
    {%- set columns = lakehouse_patterns._cdc_columns(columns, key) -%}
    {%- set key = lakehouse_patterns.as_list(key) -%}
    {%- set sources = columns.values() | map(attribute='from') | list -%}
    {%- set key_sources = [] -%}
    {%- for name in key -%}
        {%- do key_sources.append(columns[name]['from']) -%}
    {%- endfor -%}
    {%- set row = 'struct<' ~ lakehouse_patterns._cdc_text_fields(sources) ~ '>' -%}
    {%- set envelope = 'op: string, before: ' ~ row ~ ', after: ' ~ row
        ~ ', source: struct<connector: string, snapshot: string, lsn: bigint, ts_us: bigint, ts_ms: bigint>'
        ~ ', transaction: struct<id: string, total_order: bigint>' -%}
    {%- set record_key = 'struct<' ~ lakehouse_patterns._cdc_text_fields(key_sources) ~ '>' -%}
    {%- set row_operations = "cdc.op in ('c', 'r', 'u', 'd')" -%}
select
    record,
    ingested_at,
    {%- for name in columns %}
    typed.{{ lakehouse_patterns.quoted_name(name) }},
    {%- endfor %}
    cdc.op,
    cdc.lsn,
    cdc.transaction_id,
    cdc.transaction_order,
    cdc.changed_at,
    cdc.op = 'd' as is_deleted,
    reason.class as error_class,
    reason.message as error_message
from (
    select
        *,
        {#- The first reason counts. -#}
        case
            when record.payload is null then null
            when cdc.op is null
                then named_struct('class', 'MALFORMED_ENVELOPE', 'message', 'the payload is not one JSON object with op')
            when cdc.connector <> 'postgresql'
                then named_struct(
                    'class', 'UNSUPPORTED_SOURCE',
                    'message', concat(cdc.connector, ' has no lsn, which orders the changes: postgresql alone has')
                )
            when cdc.op not in ('c', 'r', 'u', 'd', 't', 'm')
                then named_struct(
                    'class', 'UNKNOWN_OPERATION',
                    'message', concat('op is ''', cdc.op, '''; known are c, r, u, d, t, m')
                )
            when cdc.op = 'm' then null
            when cdc.lsn is null or cdc.changed_at is null
                then named_struct('class', 'MALFORMED_ENVELOPE', 'message', 'source.lsn or its time is missing')
            when cdc.op = 't' then null
            when cdc.op <> 'd' and not cdc.has_after
                then named_struct('class', 'MALFORMED_ENVELOPE', 'message', concat('op ', cdc.op, ' without after'))
            when wrong.unavailable <> ''
                then named_struct(
                    'class', 'UNAVAILABLE_VALUE',
                    'message', concat(
                        'PostgreSQL left out the unchanged ', wrong.unavailable, '; set REPLICA IDENTITY FULL'
                    )
                )
            when wrong.invalid <> ''
                then named_struct(
                    'class', 'INVALID_VALUE', 'message', concat('no value of the type in ', wrong.invalid)
                )
            when {% for name in key %}typed.{{ lakehouse_patterns.quoted_name(name) }} is null
                {{- ' or ' if not loop.last }}{% endfor %}
                then named_struct('class', 'NULL_KEY', 'message', 'the key is missing')
        end as reason
    from (
        select
            record,
            ingested_at,
            cdc,
            struct(
                concat_ws(
                    ', '
                    {%- for name in columns %}
                    {%- set text = 'texts.' ~ lakehouse_patterns.quoted_name(name) %},
                    case when cdc.op = 'u' and {{ lakehouse_patterns._cdc_is_left_out(text) }}
                        then {{ lakehouse_patterns.text_literal(name) }} end
                    {%- endfor %}
                ) as unavailable,
                concat_ws(
                    ', '
                    {%- for name, column in columns.items() %}
                    {%- set text = 'texts.' ~ lakehouse_patterns.quoted_name(name) %},
                    case when {{ row_operations if name in key else "cdc.op in ('c', 'r', 'u')" }}
                        and {{ text }} is not null
                        and {{ lakehouse_patterns._cdc_typed(text, column.tree, column.unit) }} is null
                        then {{ lakehouse_patterns.text_literal(name ~ ' (' ~ column.type ~ ')') }} end
                    {%- endfor %}
                ) as invalid
            ) as wrong,
            struct(
                {%- for name, column in columns.items() %}
                {{ lakehouse_patterns._cdc_typed(
                    'texts.' ~ lakehouse_patterns.quoted_name(name), column.tree, column.unit
                ) }}
                    as {{ lakehouse_patterns.quoted_name(name) }}
                {{- ',' if not loop.last }}
                {%- endfor %}
            ) as typed
        from (
            select
                record,
                ingested_at,
                struct(
                    envelope.op,
                    envelope.source.connector,
                    {#- Rows of an incremental snapshot have no position: a negative one, from their time, puts them
                        before every change that has one, and a later snapshot of a row behind an earlier one. #}
                    case
                        when envelope.source.lsn is null
                            and envelope.op = 'r'
                            and envelope.source.snapshot = 'incremental'
                            then {{ lakehouse_patterns._cdc_source_micros() }} - 9223372036854775807
                        else envelope.source.lsn
                    end as lsn,
                    envelope.transaction.id as transaction_id,
                    envelope.transaction.total_order as transaction_order,
                    {{ lakehouse_patterns._cdc_moment(
                        'timestamp_micros(' ~ lakehouse_patterns._cdc_source_micros() ~ ')'
                    ) }} as changed_at,
                    envelope.after is not null as has_after
                ) as cdc,
                struct(
                    {%- for name, column in columns.items() %}
                    {%- set field = lakehouse_patterns.quoted_name(column['from']) %}
                    case
                        when envelope.op = 'd' then
                            {%- if name in key %}
                            coalesce(envelope.before.{{ field }}, wrapped_key.payload.{{ field }}, record_key.{{ field }})
                            {%- else %}
                            envelope.before.{{ field }}
                            {%- endif %}
                        {#- PostgreSQL sends an unchanged large value only with a full replica identity. #}
                        when {{ lakehouse_patterns._cdc_is_left_out('envelope.after.' ~ field) }}
                            then coalesce(envelope.before.{{ field }}, envelope.after.{{ field }})
                        else envelope.after.{{ field }}
                    end as {{ lakehouse_patterns.quoted_name(name) }}
                    {{- ',' if not loop.last }}
                    {%- endfor %}
                ) as text_values
            from (
                select
                    record,
                    ingested_at,
                    {#- Connect's converter wraps the envelope when it also sends the schema. #}
                    case
                        when parsed.op is null and parsed.payload is not null then parsed.payload
                        else struct(parsed.op, parsed.before, parsed.after, parsed.source, parsed.transaction)
                    end as envelope,
                    {#- Apart, as a key may have a column payload. #}
                    {{ lakehouse_patterns._json_value('record.key', record_key, 'marked') }} as record_key,
                    {{ lakehouse_patterns._json_value(
                        'record.key', 'struct<payload: ' ~ record_key ~ '>', 'marked'
                    ) }} as wrapped_key
                from (
                    select
                        struct(payload, key, topic, partition, offset, timestamp, headers) as record,
                        ingested_at,
                        parsed
                    from {{ relation }}
                    {#- Spark copies expressions into a pushed-down filter, and would parse a record a hundred times.
                        A lateral view stops these copies, while a filter on ingested_at still prunes. #}
                    lateral view explode(
                        array({{ lakehouse_patterns._json_value(
                            'payload', 'struct<' ~ envelope ~ ', payload: struct<' ~ envelope ~ '>>', 'marked') }})
                    ) once as parsed
                )
            )
        )
        {#- A number of a nested list or object is marked there, too. #}
        lateral view explode(array(struct(
            {%- for name in columns %}
            {%- set column = lakehouse_patterns.quoted_name(name) %}
            {{ lakehouse_patterns._as_written('text_values.' ~ column) }} as {{ column }}{{ ',' if not loop.last }}
            {%- endfor %}
        ))) once as texts
    )
)
{%- endmacro %}

{% macro _cdc_source_micros() %}
    {{- return('coalesce(envelope.source.ts_us, try_multiply(envelope.source.ts_ms, 1000L))') -}}
{% endmacro %}
