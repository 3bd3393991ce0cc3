{#-
    Metadata Decorator: which version and which attempt made a row, in a technical table that users don't see.

    `record_context` writes one row for each logical date (or execution time) before the rows are loaded, and
    `finish_context` its end after them. The data has only the row's key, `context_id`. The row is merged: a plain insert
    would fail or be there twice when a load is retried. Delta has no transaction over two tables, so until `finished_at`
    is set the rows may still be those of the attempt before. Each commit of the load names its own version and attempt,
    in the commit's `userMetadata`, which is written with the data in one unit. `--empty` loads no row and records nothing.
-#}

{% macro record_context(table, code_version, metadata=none, execution_time=none, schema=none, location_root=none) %}
    {{ return(adapter.dispatch('record_context', 'lakehouse_patterns')(
        table, code_version, metadata, execution_time, schema, location_root
    )) }}
{% endmacro %}

{% macro default__record_context(table, code_version, metadata, execution_time, schema, location_root) %}
    {%- if execute -%}
        {%- do lakehouse_patterns._require_metadata(code_version, metadata) -%}
    {%- endif -%}
    {%- if execute and not lakehouse_patterns.is_empty_run() -%}
        {%- set contexts = lakehouse_patterns.context_table(table, schema) -%}
        {%- set key = lakehouse_patterns.context_id(execution_time) -%}
        {%- do run_query('create schema if not exists ' ~ contexts.without_identifier()) -%}
        {%- do run_query(lakehouse_patterns._contexts_create_sql(contexts, location_root)) -%}
        {%- do run_query(lakehouse_patterns._context_merge_sql(contexts, key, code_version, metadata or {})) -%}
        {%- set attempt = run_query(
            'select loading_attempt from ' ~ contexts ~ ' where execution_time = ' ~ key
        ).rows[0][0] -%}
        {%- do lakehouse_patterns._note_commits(dict(metadata or {}, **{
            'context': contexts.identifier,
            'execution_time': lakehouse_patterns._execution_time(execution_time).isoformat() ~ 'Z',
            'code_version': code_version,
            'loading_attempt': attempt | int,
            'invocation_id': invocation_id
        })) -%}
    {%- endif -%}
{% endmacro %}


{% macro finish_context(table, execution_time=none, schema=none) %}
    {{ return(adapter.dispatch('finish_context', 'lakehouse_patterns')(table, execution_time, schema)) }}
{% endmacro %}

{% macro default__finish_context(table, execution_time, schema) %}
    {%- if execute and not lakehouse_patterns.is_empty_run() -%}
        {#- First, so that the note isn't left to later commits. -#}
        {%- if lakehouse_patterns._commit_note().is_ours -%}
            {%- do run_query('reset ' ~ lakehouse_patterns._commit_note_setting()) -%}
        {%- endif -%}
        {%- do run_query(
            'update ' ~ lakehouse_patterns.context_table(table, schema)
            ~ ' set finished_at = current_timestamp() where execution_time = '
            ~ lakehouse_patterns.context_id(execution_time)
            ~ ' and invocation_id = ' ~ lakehouse_patterns.text_literal(invocation_id)
        ) -%}
    {%- endif -%}
{% endmacro %}


{% macro context_table(table, schema=none) %}
    {{ return(adapter.dispatch('context_table', 'lakehouse_patterns')(table, schema)) }}
{% endmacro %}

{% macro default__context_table(table, schema) %}
    {#- A schema of its own can be closed to users as a whole. -#}
    {{ return(api.Relation.create(
        database=database, schema=schema or target.schema ~ '_technical', identifier=table, type='table'
    ).quote(schema=true, identifier=true)) }}
{% endmacro %}


{% macro context_id(execution_time=none) %}
    {{ return(adapter.dispatch('context_id', 'lakehouse_patterns')(execution_time)) }}
{% endmacro %}

{% macro default__context_id(execution_time) %}
    {%- if not execute -%}
        {{ return('cast(null as timestamp)') }}
    {%- endif -%}
    {{ return(lakehouse_patterns.timestamp_literal(lakehouse_patterns._execution_time(execution_time))) }}
{% endmacro %}


{% macro public_view(relation, technical_columns=['processing_context_id']) %}
    {{ return(adapter.dispatch('public_view', 'lakehouse_patterns')(relation, technical_columns)) }}
{% endmacro %}

{% macro default__public_view(relation, technical_columns) %}
    {%- set names = lakehouse_patterns.quoted_names(lakehouse_patterns.as_list(technical_columns)) -%}
    {%- do lakehouse_patterns.require(names, 'public_view needs technical_columns: those to hide') -%}
    {#- A name that the relation doesn't have ends the query: a misspelt one would leave its column public. #}
select * except ({{ names | join(', ') }})
from {{ relation }}
{%- endmacro %}


{% macro _metadata_keys() %}
    {#- As in python_jobs/data_value/technical_metadata.py. -#}
    {{ return(['commit_id', 'environment', 'job_name', 'run_id', 'triggered_by']) }}
{% endmacro %}


{% macro _require_metadata(code_version, metadata) %}
    {%- do lakehouse_patterns.require(
        code_version is string and code_version | trim and code_version | length <= 15,
        'code_version must be a text of 1 to 15 characters, got ' ~ (
            "'" ~ code_version ~ "'" if code_version is string else code_version
        )
    ) -%}
    {%- do lakehouse_patterns.require(
        metadata is none or metadata is mapping, 'metadata must map keys to texts, got ' ~ metadata
    ) -%}
    {%- for key, value in (metadata or {}).items() -%}
        {%- do lakehouse_patterns.require(
            key in lakehouse_patterns._metadata_keys(),
            "metadata has no key '" ~ key ~ "'; allowed: " ~ (lakehouse_patterns._metadata_keys() | join(', '))
            ~ '. A business attribute belongs in the row or in an envelope around it (wrapper)'
        ) -%}
        {%- do lakehouse_patterns.require(
            value is string and value, 'metadata.' ~ key ~ " must be a text that isn't empty, got " ~ value
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _execution_time(execution_time) %}
    {{ return(lakehouse_patterns._moment('execution_time', execution_time or lakehouse_patterns.logical_date())) }}
{% endmacro %}


{% macro _contexts_create_sql(contexts, location_root) %}
create table if not exists {{ contexts }} (
    execution_time timestamp not null comment 'key: what processing_context_id of a row names',
    code_version varchar(15) not null comment 'version of the code of the last attempt',
    loading_attempt int not null comment '1, and one more for each further run',
    loading_time timestamp comment 'start of the run of the last attempt',
    finished_at timestamp comment 'NULL while the last attempt is at work, and after it failed',
    invocation_id string comment 'dbt run of the last attempt',
    metadata map<string, string> comment 'further keys of the last attempt'
)
using delta
{%- if location_root %}
location {{ lakehouse_patterns.text_literal(location_root ~ '/' ~ contexts.identifier) }}
{%- endif %}
{% endmacro %}


{% macro _context_merge_sql(contexts, key, code_version, metadata) %}
    {%- set run_id, pairs = lakehouse_patterns.text_literal(invocation_id), [] -%}
    {%- for name, value in metadata.items() -%}
        {%- do pairs.extend([lakehouse_patterns.text_literal(name), lakehouse_patterns.text_literal(value)]) -%}
    {%- endfor -%}
merge into {{ contexts }} as stored
using (
    select
        {{ key }} as execution_time,
        {{ lakehouse_patterns.text_literal(code_version) }} as code_version,
        {#- A second hook of one run is no second attempt. #}
        coalesce((
            select max(if(invocation_id <=> {{ run_id }}, loading_attempt, loading_attempt + 1))
            from {{ contexts }}
            where execution_time = {{ key }}
        ), 1) as loading_attempt,
        {{ lakehouse_patterns.timestamp_literal(run_started_at) }} as loading_time,
        cast(null as timestamp) as finished_at,
        {{ run_id }} as invocation_id,
        try_cast(map({{ pairs | join(', ') }}) as map<string, string>) as metadata
) as attempt
    on stored.execution_time = attempt.execution_time
when matched then update set
    code_version = attempt.code_version,
    loading_attempt = attempt.loading_attempt,
    loading_time = attempt.loading_time,
    finished_at = attempt.finished_at,
    invocation_id = attempt.invocation_id,
    metadata = attempt.metadata
when not matched then insert *
{%- endmacro %}


{% macro _commit_note_setting() %}
    {{ return('spark.databricks.delta.commitInfo.userMetadata') }}
{% endmacro %}


{% macro _commit_note() %}
    {#- Whether the session has a note for commits, and whether it is one of ours. -#}
    {%- set text = run_query('set ' ~ lakehouse_patterns._commit_note_setting()).rows[0][1] -%}
    {%- set note = fromjson(text, {}) -%}
    {{ return({
        'is_set': text != '<undefined>',
        'is_ours': note is mapping and 'processing_context' in note,
    }) }}
{% endmacro %}


{% macro _note_commits(context) %}
    {#- A note that the user has set for the session stays. One of a single write goes before that of the session. -#}
    {%- set found = lakehouse_patterns._commit_note() -%}
    {%- if not found.is_set or found.is_ours -%}
        {%- do run_query(
            'set ' ~ lakehouse_patterns._commit_note_setting() ~ ' = '
            ~ lakehouse_patterns.quoted_name(tojson({'processing_context': context}))
        ) -%}
    {%- endif -%}
{% endmacro %}


{% test no_technical_columns(
    model, names=['processing_context', 'processing_context_id', 'visits_context_execution_date_time']
) %}
    {#- Fails with one row for each technical column that a public table or view still exposes. -#}
{{ lakehouse_patterns._exposed_columns_sql(model, names) }}
{% endtest %}
