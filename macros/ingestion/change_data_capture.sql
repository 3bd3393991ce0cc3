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
    {#- What isn't a column of the result lives in structs (`cdc`, `texts`, `typed`), whose fields can't meet the names of
        the source's columns. -#}
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
                then named_struct('class', 'MALFORMED_ENVELOPE', 'message', 'the payload is no JSON object with op')
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
                        and {{ lakehouse_patterns._cdc_typed(text, column) }} is null
                        then {{ lakehouse_patterns.text_literal(name ~ ' (' ~ column.type ~ ')') }} end
                    {%- endfor %}
                ) as invalid
            ) as wrong,
            struct(
                {%- for name, column in columns.items() %}
                {{ lakehouse_patterns._cdc_typed('texts.' ~ lakehouse_patterns.quoted_name(name), column) }}
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
                    timestamp_micros({{ lakehouse_patterns._cdc_source_micros() }}) as changed_at,
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
                    from_json(record.key, {{ lakehouse_patterns.text_literal(record_key) }}) as record_key,
                    from_json(
                        record.key, {{ lakehouse_patterns.text_literal('struct<payload: ' ~ record_key ~ '>') }}
                    ) as wrapped_key
                from (
                    select
                        struct(payload, key, topic, partition, offset, timestamp, headers) as record,
                        ingested_at,
                        parsed
                    from {{ relation }}
                    {#- Spark copies expressions into a pushed-down filter, and would parse a record a hundred times.
                        A lateral view stops these copies, while a filter on ingested_at still prunes. #}
                    lateral view explode(
                        array(from_json(payload, {{ lakehouse_patterns.text_literal(
                            'struct<' ~ envelope ~ ', payload: struct<' ~ envelope ~ '>>') }}))
                    ) once as parsed
                )
            )
        )
        lateral view explode(array(text_values)) once as texts
    )
)
{%- endmacro %}


{% macro _cdc_source_micros() %}
    {{- return('coalesce(envelope.source.ts_us, try_multiply(envelope.source.ts_ms, 1000L))') -}}
{% endmacro %}


{% macro change_data_capture_changes(flagged, key) %}
    {{ return(adapter.dispatch('change_data_capture_changes', 'lakehouse_patterns')(flagged, key)) }}
{% endmacro %}

{% macro default__change_data_capture_changes(flagged, key) %}
    {%- set key_names = lakehouse_patterns.as_list(key) -%}
    {%- do lakehouse_patterns.require(key_names, 'key must name the columns of the primary key') -%}
    {%- set key = lakehouse_patterns.quoted_names(key_names) -%}
    {%- set columns = lakehouse_patterns._cdc_row_columns(flagged, key_names) -%}
    {%- set batch = lakehouse_patterns._cdc_batch(flagged) -%}
    {%- set of_truncate = ['op', 'lsn', 'transaction_id', 'transaction_order', 'changed_at'] -%}
    {%- set own = of_truncate + ['is_deleted', 'ingested_at'] -%}
with batch as (
    select *
    from {{ flagged }}
    where
        error_class is null
        and op in ('c', 'r', 'u', 'd', 't')
        and {{ batch.window }}
),

{# A restarted connector sends its last changes again: the first copy of each counts. -#}
row_changes as (
    select {{ (lakehouse_patterns.quoted_names(columns) + own) | join(', ') }}
    from (
        select
            *,
            row_number() over (
                partition by {{ key | join(', ') }}, lsn, op
                order by ingested_at, record.offset
            ) as __lp_copy
        from batch
        where op <> 't'
    ) as changes
    {%- if batch.first_lsn is not none %}
    left anti join (
        select {{ key | join(', ') }}, lsn, op
        from {{ this }}
        where lsn >= {{ batch.first_lsn }}
    ) as held
        on changes.lsn = held.lsn
        and changes.op = held.op
        {%- for name in key %}
        and changes.{{ name }} = held.{{ name }}
        {%- endfor %}
    {%- endif %}
    where __lp_copy = 1
)

select *
from row_changes
{%- if batch.has_truncates %}
union all
{# A truncate names no row: it deletes every key whose last change before it wasn't a deletion. -#}
select
    {%- for name, type in columns.items() %}
    {{ 'known.' ~ adapter.quote(name) if name in key_names
        else 'cast(null as ' ~ type ~ ') as ' ~ adapter.quote(name) }},
    {%- endfor %}
    {%- for name in of_truncate %}
    truncates.{{ name }},
    {%- endfor %}
    true as is_deleted,
    truncates.ingested_at
from batch as truncates
inner join (
    select {{ key | join(', ') }}, lsn, is_deleted
    from row_changes
    {%- if lakehouse_patterns.is_incremental() %}
    union all
    select {{ key | join(', ') }}, lsn, is_deleted
    from {{ this }}
    {%- endif %}
) as known
    on truncates.lsn > known.lsn
where truncates.op = 't'
group by
    {%- for name in key %}
    known.{{ name }},
    {%- endfor %}
    {%- for name in of_truncate %}
    truncates.{{ name }},
    {%- endfor %}
    truncates.ingested_at
having not max_by(known.is_deleted, known.lsn)
{%- endif %}
{%- endmacro %}


{% macro _cdc_batch(flagged) %}
    {#-
        The window of this run, whether it holds truncates, and `first_lsn`, from which on the model may already hold
        changes. The end of the window is fixed here, because the statement depends on whether the window has truncates,
        and a truncate could arrive in between. This query doesn't check the records for errors: the check takes most of
        the time, and the statement does it anyway.
    -#}
    {%- set window = lakehouse_patterns.incremental_window('ingested_at') -%}
    {%- if not execute or not lakehouse_patterns.is_incremental() -%}
        {{ return({'window': window, 'first_lsn': none, 'has_truncates': true}) }}
    {%- endif -%}
    {%- set row = run_query(
        "select unix_micros(max(ingested_at)) as last_ingested_at, min(lsn) as first_lsn, "
        ~ "coalesce(bool_or(op = 't'), false) as has_truncates from " ~ flagged
        ~ " where " ~ window
    ).rows[0] -%}
    {%- if row['last_ingested_at'] is none -%}
        {{ return({'window': 'false', 'first_lsn': none, 'has_truncates': false}) }}
    {%- endif -%}
    {{ return({
        'window': window ~ ' and ingested_at <= timestamp_micros(' ~ row['last_ingested_at'] ~ ')',
        'first_lsn': row['first_lsn'],
        'has_truncates': row['has_truncates']
    }) }}
{% endmacro %}


{% macro _cdc_own_columns() %}
    {{ return([
        'record', 'ingested_at', 'op', 'lsn', 'transaction_id', 'transaction_order', 'changed_at', 'is_deleted',
        'error_class', 'error_message'
    ]) }}
{% endmacro %}


{% macro _cdc_row_columns(flagged, key_names) %}
    {#- The columns of the source's rows with their types; only the key while the flagged relation is absent. -#}
    {%- set columns = {} -%}
    {%- for name, type in (lakehouse_patterns.column_types(flagged) if execute else {}).items()
        if name | lower not in lakehouse_patterns._cdc_own_columns() -%}
        {%- do columns.update({name: type}) -%}
    {%- endfor -%}
    {%- for name in key_names -%}
        {%- do lakehouse_patterns.require(
            not columns or name in columns,
            "key names '" ~ name ~ "', which is none of the columns " ~ (columns | join(', '))
        ) -%}
        {%- do columns.setdefault(name, 'string') -%}
    {%- endfor -%}
    {{ return(columns) }}
{% endmacro %}


{% macro _cdc_columns(columns, key) %}
    {#- The columns with all options: a mapping from the name to {type, from, unit}. -#}
    {%- do lakehouse_patterns.require(
        columns is mapping and columns | length > 0,
        'columns must map the names of the columns to their types, got ' ~ columns
    ) -%}
    {%- set own = lakehouse_patterns._cdc_own_columns() -%}
    {%- set complete = {} -%}
    {%- for name, given in columns.items() -%}
        {%- set column = {'type': given} if given is string else given -%}
        {%- do lakehouse_patterns.require(
            column is mapping, "column '" ~ name ~ "' needs a type or a mapping {type, from, unit}, got " ~ given
        ) -%}
        {%- do lakehouse_patterns.require_known_keys("column '" ~ name ~ "'", column, ['type', 'from', 'unit']) -%}
        {%- do lakehouse_patterns.require(column.type, "column '" ~ name ~ "' has no type") -%}
        {%- do lakehouse_patterns.require(
            name | lower not in own,
            "'" ~ name ~ "' is a column of a change itself: give it another name, and its name in the source as from"
        ) -%}
        {%- do lakehouse_patterns.require_one_of(
            "unit of column '" ~ name ~ "'", column.get('unit', 'microseconds'), ['microseconds', 'milliseconds']
        ) -%}
        {%- do lakehouse_patterns._cdc_require_type(name, column.type | lower | trim) -%}
        {%- do complete.update({name: {
            'type': column.type | trim, 'from': column.get('from', name), 'unit': column.get('unit', 'microseconds')
        }}) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(lakehouse_patterns.as_list(key), 'key must name the columns of the primary key') -%}
    {%- for name in lakehouse_patterns.as_list(key) -%}
        {%- do lakehouse_patterns.require(
            name in complete, "key names '" ~ name ~ "', which is none of the columns " ~ (complete | join(', '))
        ) -%}
    {%- endfor -%}
    {{ return(complete) }}
{% endmacro %}


{% macro _cdc_text_fields(names) %}
    {#- Every value is read as text first, because from_json silently drops a number that doesn't fit its type. -#}
    {%- set fields = [] -%}
    {%- for name in names | unique -%}
        {%- do fields.append(lakehouse_patterns.quoted_name(name) ~ ': string') -%}
    {%- endfor -%}
    {{ return(fields | join(', ')) }}
{% endmacro %}


{% macro _cdc_is_left_out(text) %}
    {#-
        Debezium's placeholder for a value that PostgreSQL didn't send: plain, within an array, in base64, as the bytes of
        its text (arrays of numbers and dates) or as the UUID of their hash (arrays of uuid). Arrays of other types come
        as NULL, which nobody can tell from NULL.
    -#}
    {%- set placeholder = '__debezium_unavailable_value' -%}
    {%- set bytes = '[95,95,100,101,98,101,122,105,117,109,95,117,110,97,118,97,105,108,97,98,108,101,95,'
        ~ '118,97,108,117,101]' -%}
    {{ return("(contains(" ~ text ~ ", '" ~ placeholder ~ "') or " ~ text
        ~ " = 'X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=='"
        ~ " or contains(" ~ text ~ ", 'b68a35a7-17ad-35b3-af2a-ae46edb4545a')"
        ~ " or startswith(" ~ text ~ ", '[95') and regexp_replace(" ~ text ~ ", ' ', '') = '" ~ bytes ~ "')") }}
{% endmacro %}


{% macro _cdc_types() %}
    {#- The types that a column can have, as regular expressions. Nested ones may hold any of them. -#}
    {{ return([
        'string', 'boolean', 'binary', 'date', 'timestamp', 'timestamp_ntz',
        'tinyint|byte', 'smallint|short', 'int|integer', 'bigint|long', 'float|real', 'double',
        '(decimal|dec|numeric)\\(\\s*\\d+\\s*(,\\s*\\d+\\s*)?\\)', '(var)?char\\(\\s*\\d+\\s*\\)',
        'array<.+>', 'map<.+>', 'struct<.+>'
    ]) }}
{% endmacro %}


{% macro _cdc_require_type(name, type) %}
    {#- A type that isn't known would become NULL, or something else than the source has. -#}
    {%- set known = [] -%}
    {%- for pattern in lakehouse_patterns._cdc_types() if modules.re.fullmatch(pattern, type) -%}
        {%- do known.append(pattern) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        known,
        "column '" ~ name ~ "' has the type '" ~ type ~ "'; allowed are string, char(n), varchar(n), boolean, tinyint, "
        ~ 'smallint, int, bigint, float, double, decimal with its digits, date, timestamp, timestamp_ntz, binary, array, '
        ~ 'map, struct'
    ) -%}
    {%- if type.startswith('array<') -%}
        {%- do lakehouse_patterns._cdc_require_type(name, type[6:-1] | trim) -%}
    {%- endif -%}
{% endmacro %}


{% macro _cdc_typed(text, column) %}
    {#- Debezium's notation (time.precision.mode adaptive) as a value of the type; NULL for what is none. -#}
    {%- set type = column.type | lower -%}
    {%- if type == 'string' -%}
        {{ return(text) }}
    {%- elif modules.re.fullmatch('(var)?char\\(.*\\)', type) -%}
        {{ return('case when char_length(' ~ text ~ ') <= ' ~ modules.re.findall('\\d+', type)[0] ~ ' then ' ~ text ~ ' end') }}
    {%- elif type in ('timestamp', 'timestamp_ntz') -%}
        {%- set number = 'try_cast(' ~ text ~ ' as bigint)' -%}
        {%- set micros = 'try_multiply(' ~ number ~ ', 1000L)' if column.unit == 'milliseconds' else number -%}
        {%- if type == 'timestamp' -%}
            {{ return('coalesce(timestamp_micros(' ~ micros ~ '), ' ~ lakehouse_patterns._full_timestamp(text) ~ ')') }}
        {%- endif -%}
        {#- The number counts from 1970 in no zone: through the session's zone and back. -#}
        {{ return(
            "coalesce(convert_timezone('UTC', try_cast(timestamp_micros(" ~ micros ~ ') as timestamp_ntz)), '
            ~ 'case when ' ~ lakehouse_patterns._is_full_timestamp(text) ~ ' then try_cast(' ~ text ~ ' as timestamp_ntz) end)'
        ) }}
    {%- elif type == 'date' -%}
        {{ return(
            'coalesce(date_from_unix_date(try_cast(' ~ text ~ ' as int)), case when ' ~ text
            ~ " rlike '^-?[0-9]{4,}-[0-9]{2}-[0-9]{2}$' then try_cast(" ~ text ~ ' as date) end)'
        ) }}
    {%- elif type == 'binary' -%}
        {{ return("try_to_binary(" ~ text ~ ", 'base64')") }}
    {%- elif type.startswith('array<') -%}
        {#- Element by element, as each may be in Debezium's notation; one that is no value makes the whole none. -#}
        {%- set of_items = {'type': column.type[6:-1] | trim, 'unit': column.unit} -%}
        {%- set typed = lakehouse_patterns._cdc_typed('item', of_items) -%}
        {%- set items = 'from_json(' ~ text ~ ", 'array<string>')" -%}
        {{ return(
            'case when forall(' ~ items ~ ', item -> item is null or ' ~ typed ~ ' is not null) '
            ~ 'then transform(' ~ items ~ ', item -> ' ~ typed ~ ') end'
        ) }}
    {%- elif type.startswith('map') or type.startswith('struct') -%}
        {{ return('from_json(' ~ text ~ ', ' ~ lakehouse_patterns.text_literal(column.type) ~ ')') }}
    {%- elif modules.re.fullmatch('(decimal|dec|numeric)\\(.*\\)', type) -%}
        {#- A cast would round what the source's wider column holds. -#}
        {%- set digits = modules.re.findall('\\d+', type) -%}
        {%- set scale = digits[1] | int if digits | length > 1 else 0 -%}
        {%- set exact = 'decimal(38, ' ~ (38 - (digits[0] | int) + scale) ~ ')' -%}
        {{ return(
            'case when try_cast(' ~ text ~ ' as ' ~ type ~ ') = try_cast(' ~ text ~ ' as ' ~ exact
            ~ ') then try_cast(' ~ text ~ ' as ' ~ type ~ ') end'
        ) }}
    {%- else -%}
        {{ return('try_cast(' ~ text ~ ' as ' ~ type ~ ')') }}
    {%- endif -%}
{% endmacro %}
